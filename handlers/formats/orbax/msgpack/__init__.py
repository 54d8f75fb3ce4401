"""The msgpack file in which early Orbax kept the structure of a tree, and small values.

`cursor` reads tokens, `msgpack_tree` makes leaves of them, `chunked_values` joins arrays that were cut, and
`embedded_leaf` says what is known of such a leaf.
"""
