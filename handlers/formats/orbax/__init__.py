"""Orbax's format: a whole checkpoint (`OrbaxLayout`), or a tree in a directory made by others (`TreeLayout`).

A checkpoint is a directory with documents in JSON, the arrays in an OCDBT database
(`penstock.handlers.ocdbt`) or in a directory each, and files that mark it as finished. Trees may also be
items in it, and steps of a run.

How a save uses the rooms: `writing` chooses how each leaf is stored and makes all documents, with the
encoders of `documents` and with the index of chunks from `chunks`.

How a restore uses them: `discovery` finds the tree, the item or the latest step below a path; `reading` reads
its documents with the decoders of `documents` (and of `msgpack`, for early Orbax) into a table of leaves; the
`OrbaxCheckpoint` it returns plans reads with `chunks`.
"""
