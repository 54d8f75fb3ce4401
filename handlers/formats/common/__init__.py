"""What more than one format needs.

* JSON: `checked_json` parses a document and looks at its members; `json_slices` decodes a long one piece by
  piece.
* Arrays: `zarr_metadata` is the document of one array, `chunk_keys` are the keys of its chunks.
* Reads: `chunk_regions` says how part of a chunk gets into part of a buffer, `checksummed_reads` cuts reads
  along the pieces whose checksums are recorded in the file that `integrity` encodes and decodes.
* Trees: `key_paths` and `temporary_names` are conventions; `leaf_table` holds what is stored of every leaf.
"""
