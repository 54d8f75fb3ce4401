"""Checkpoint formats: which files a directory holds, and what its documents say.

A format is a layout (`penstock.kernel.Layout`): it says which files a save makes, and opens a checkpoint.
What it opens is a `StoredCheckpoint`: the leaves that were stored, and for any part of a leaf the reads that
fetch it. Formats plan reads and make documents; array bytes are read and written by the stages.

* `orbax`: the format that penstock writes by default, and everything that Orbax ever wrote.
* `items`: a checkpoint of several named items, each a tree, an array or one of Orbax's documents.
* `safetensors`: files and folders of them.
* `npz`: archives of NumPy, which only conversions read.
* `common`: what more than one format needs.
* `auto_layout`: writes one of them, and opens any of them.

`orbax`, `safetensors` and `npz` do not know each other; `items` is built on `orbax`.
"""
