"""The room `kernel/memory`."""
