"""The room `penstock/cli/terminal`."""
