"""Tools for whole checkpoints: `convert` and `export`, `repair`, and what they share.

`stored_items` takes a checkpoint apart, `stored_steps` finds those of a directory, and `rewriting` saves what
was taken apart. `salvage` decides what of a damaged one is kept; it reads through a `patched_store`.
"""
