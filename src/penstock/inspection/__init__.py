"""Looks at a path without restoring any of it: steps, items, leaves, sizes, differences.

The command line and the browser page are made of it. Nothing here needs jax or TensorStore, except where
values are read. What is `async` reads all of one state of a checkpoint; every other function blocks.
"""
