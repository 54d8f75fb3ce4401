"""The names of Orbax's checkpoint API."""
