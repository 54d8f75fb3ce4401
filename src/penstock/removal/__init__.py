"""Deleting one checkpoint, wherever it lies."""
