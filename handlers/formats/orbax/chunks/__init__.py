"""The room `handlers/formats/orbax/chunks`."""
