"""OCDBT, TensorStore's database in files: the index of an Orbax checkpoint.

* `database_reader`: reads an index; finds what is left of a damaged one.
* `database_writer`: encodes an index.
* `index`: the keys and values of a database in memory.
* `wire_format`: numbers, checksums, and what a key maps to.
"""
