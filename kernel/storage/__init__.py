"""The room `kernel/storage`."""
