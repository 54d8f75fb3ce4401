"""The room `stages/files`."""
