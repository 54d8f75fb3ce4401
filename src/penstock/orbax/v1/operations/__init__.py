"""The functions of Orbax's v1 API: save, load, delete, metadata, and their background forms."""
