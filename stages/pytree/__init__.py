"""From pytrees to leaves.

`flattening` names the leaves of a tree; `structure_cache` does so once for each structure. `node_types`
records the classes of tuples. `save_args` finds the options of each leaf. `description_cache` keeps the
descriptions of trees that were saved before.
"""
