"""The room `stages/planning`."""
