"""The room `kernel/pipeline`."""
