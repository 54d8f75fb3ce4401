"""The room `kernel/protocols`."""
