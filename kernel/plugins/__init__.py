"""The room `kernel/plugins`."""
