"""The room `handlers/formats/orbax/discovery`."""
