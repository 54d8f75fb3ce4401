"""The room `penstock/orbax/v0/handlers`."""
