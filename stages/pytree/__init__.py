"""From pytrees to leaves: `flattening` names the leaves of a tree, and records the classes of tuples."""
