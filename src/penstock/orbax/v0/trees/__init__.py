"""The room `penstock/orbax/v0/trees`."""
