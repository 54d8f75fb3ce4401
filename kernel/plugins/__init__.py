"""Registries of handlers and of stages, to which other distributions add."""
