"""The room `penstock/orbax/v0`."""
