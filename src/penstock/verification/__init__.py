"""Verifies that everything under a path is still what was written: every checkpoint, item and file."""
