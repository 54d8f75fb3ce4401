"""The room `handlers/formats/common`."""
