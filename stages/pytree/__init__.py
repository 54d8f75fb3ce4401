"""From pytrees to leaves.

`flattening` names the leaves of a tree; `structure_cache` does so once for each structure, and records the
classes of tuples. `save_args` finds the options of each leaf. `describing` describes all leaves, and keeps
the descriptions of trees that were saved before.
"""
