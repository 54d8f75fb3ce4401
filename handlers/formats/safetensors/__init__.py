"""safetensors files and folders of them, read as a tree and written.

`header` reads, decodes, checks and encodes what a file begins with. `file_set` finds the
files of a checkpoint. `penstock_metadata` is what a tensor cannot say, kept in `__metadata__`.
`safetensors_checkpoint` turns names into key paths and plans reads. `safetensors_layout` decides the place of
each tensor of a new file, and makes the checksums of its header during a save. `file_digests` is the form of
these checksums, and `tensor_survey` says what `verify` can compare. `pretrained_layout` writes what Hugging
Face's transformers would.
"""
