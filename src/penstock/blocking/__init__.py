"""The room `penstock/blocking`."""
