"""Checkpoint formats: the files in a directory, and the content of its documents.

A format is a layout (`penstock.kernel.Layout`): it names the files of a save, and opens a checkpoint.
What it opens is a `StoredCheckpoint`: the leaves that were stored, and for any part of a leaf the reads that
fetch it. Formats plan reads and make documents; array bytes are read and written by the stages.

* `orbax`: the format that penstock writes by default, and everything that Orbax ever wrote.
* `safetensors`: files and folders of them.
* `npz_archive`: archives of NumPy, which only conversions read.

The modules in this folder serve all of them: `zarr` for metadata, `integrity` and `verification` for
checksums, `region_reads` and `leaf_table` for what a checkpoint holds, `untrusted` for input that may be
damaged.

The formats do not know each other; `penstock.handlers.layouts` puts them together.
"""
