"""The room `kernel/config`."""
