"""File systems and object stores behind the one store protocol."""
