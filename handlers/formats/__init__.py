"""The formats of checkpoints: what lies where in a directory, and what the documents there say.

A format is a layout (`penstock.kernel.Layout`): it says which files a save makes, and opens a checkpoint.
What it opens is a `StoredCheckpoint`: the leaves that were stored, and for any part of a leaf the reads that
fetch it. Formats plan reads and make documents; array bytes are read and written by the stages.

* `orbax`: the format that penstock writes unless told otherwise, and all that Orbax ever wrote.
* `items`: a checkpoint of several named items, each of which is a tree, an array or a document of Orbax's.
* `safetensors`: files and folders of them.
* `common`: what more than one format needs.
* `auto_layout`: writes as one of them does, and opens whatever is there.

`orbax` and `safetensors` do not know each other; `items` is built on `orbax`.
"""
