"""safetensors files and folders of them, read as a tree and written.

`header` reads and encodes what a file begins with; `header_decoding` decodes and checks it. `file_set` finds
the files of a checkpoint. `penstock_metadata` is what a tensor cannot say, kept in `__metadata__`.
`safetensors_checkpoint` plans reads; `tensor_names` turns names into key paths. `tensor_offsets` decides
where each tensor of a new file lies. `file_digests` is the form of the checksums in a header,
`written_digests` makes them during a save, and `tensor_survey` says what `verify` can compare.
"""
