"""What a conversion changes of the leaves."""
