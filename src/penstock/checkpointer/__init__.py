"""The room `penstock/checkpointer`."""
