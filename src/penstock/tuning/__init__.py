"""Measuring a store with real saves and restores, and the options that are faster there."""
