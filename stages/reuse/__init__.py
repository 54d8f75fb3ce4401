"""The room `stages/reuse`."""
