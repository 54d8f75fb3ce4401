"""The room `stages/pytree`."""
