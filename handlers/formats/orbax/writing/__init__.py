"""The room `handlers/formats/orbax/writing`."""
