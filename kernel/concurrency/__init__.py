"""The room `kernel/concurrency`."""
