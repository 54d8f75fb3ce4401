"""How a tree handler saves and restores: targets, transformations, descriptions."""
