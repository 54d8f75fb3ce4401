"""Which store a path lies in."""
