"""Orbax's first API, the one of `orbax.checkpoint`."""
