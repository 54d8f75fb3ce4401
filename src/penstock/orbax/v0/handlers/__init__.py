"""Orbax's checkpoint handlers: trees, arrays, JSON, random keys, `Composite` of several items."""
