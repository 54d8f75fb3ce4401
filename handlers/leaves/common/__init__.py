"""The room `handlers/leaves/common`."""
