"""Orbax's `Checkpointer`, `AsyncCheckpointer`, and their short forms."""
