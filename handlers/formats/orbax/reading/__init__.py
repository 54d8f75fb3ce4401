"""The room `handlers/formats/orbax/reading`."""
