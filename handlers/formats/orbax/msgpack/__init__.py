"""The room `handlers/formats/orbax/msgpack`."""
