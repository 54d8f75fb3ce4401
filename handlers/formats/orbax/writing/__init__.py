"""The parts of a new checkpoint other than array bytes.

`storage_choice` decides dtype, chunks and codec of a leaf, with the shapes of `chunk_shapes` and
`replica_chunks`; `codecs` encodes chunks. `name_collisions` refuses names that cannot be stored together.
`documents` makes every document, in the order in which they must become durable.
"""
