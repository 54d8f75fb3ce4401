"""The room `penstock/orbax/v1/trees`."""
