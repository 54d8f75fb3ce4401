"""From pytrees to leaves.

`flattening` names the leaves of a tree; `structure_cache` does so once for each structure, and records the
classes of tuples. `per_process` is the node for values that each process has for itself.
"""
