"""The room `penstock/orbax/common`."""
