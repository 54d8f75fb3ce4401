"""The room `penstock/cli/demo`."""
