"""Where the chunks of arrays lie.

`chunk_index` is the index of a new checkpoint. `stored_index` finds chunks that are files, and checks that
data files are there in their whole length. `written_parts` says which pieces a stored chunk was written in.
`embedded_arrays` are arrays inside of other documents. `tensorstore_reads` reads chunks that have a codec.
"""
