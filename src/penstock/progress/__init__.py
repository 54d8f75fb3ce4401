"""Showing how far one save or restore is."""
