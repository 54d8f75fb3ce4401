"""NumPy's archives of arrays (`.npz`), read as a flat dict.

`archive_members` reads what a zip archive says about its arrays, and compares their checksums.
`npz_checkpoint` plans the reads: ranges of the file where an array lies in it as it is, else whole members,
which `member_bytes` unpacks. `npz_paths` tells the files by their names.
"""
