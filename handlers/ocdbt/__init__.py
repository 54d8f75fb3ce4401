"""OCDBT, TensorStore's database in files: the index of an Orbax checkpoint.

* `database_reader`: reads an index; finds what is left of a damaged one.
* `database_writer`: encodes an index.
* `node_decoding`: the manifest and the nodes of the B+tree, as values.
* `key_tables`: the columns of keys and of data files that a node begins with.
* `wire_format`: numbers, checksums, and what a key maps to.
"""
