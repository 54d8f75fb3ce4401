"""File systems and object stores, which all implement one protocol."""
