"""The room `handlers/formats/orbax/documents`."""
