"""The room `stages/common`."""
