"""The documents of a checkpoint, one file each: bytes in, values out, and back. Pure.

`file_names` says what each is called. `tree_metadata` is `_METADATA`, the list of leaves; its entries are
decoded in `tree_entries`, and the classes of containers that it may record in `tuple_types`. Beside it may
lie `array_metadatas`, `sharding_document` and `strings_document`. `checkpoint_metadata` is about the
checkpoint.
"""
