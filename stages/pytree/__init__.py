"""From pytrees to leaves.

`flattening` names the leaves of a tree, `structure_cache` does so once for each structure. `node_types` notes
the classes of tuples. `save_args` finds the options of each leaf. `description_cache` has the trees that were
saved before.
"""
