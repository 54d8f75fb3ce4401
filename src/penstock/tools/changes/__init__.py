"""Changes that a conversion makes to leaves."""
