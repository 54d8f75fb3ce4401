"""Tools for whole checkpoints: `convert` and `export`, `repair`, and what they share.

The room `rewriting` takes a checkpoint apart, and saves what was taken apart. `salvage` decides what of a
damaged one is kept; it reads through a `patched_store`.
"""
