"""Verifies that everything under a path is still what was written, and copies what is."""
