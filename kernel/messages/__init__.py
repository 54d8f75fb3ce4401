"""The room `kernel/messages`."""
