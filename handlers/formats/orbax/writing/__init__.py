"""What a new checkpoint consists of, beside the bytes of its arrays.

`storage_choice` decides dtype, chunks and codec of a leaf, with the shapes of `chunk_shapes` and
`replica_chunks`; `codecs` encodes chunks. `name_collisions` refuses names that cannot lie beside each other.
`documents` makes every document, in the order in which they must become durable.
"""
