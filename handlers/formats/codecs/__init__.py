"""Codecs of penstock's own, one file each, and the helper for those that TensorStore has.

A codec is a value with four methods (`penstock.kernel.codecs`): its options in the metadata of zarr
2 and 3, encoding, and decoding where TensorStore cannot. docs/examples/plugin has one of a third party.
"""
