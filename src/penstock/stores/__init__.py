"""Finds the store of a path."""
