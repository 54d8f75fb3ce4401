"""The room `handlers/formats`."""
