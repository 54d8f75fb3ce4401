"""The room `penstock/tools`."""
