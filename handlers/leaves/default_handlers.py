"""The handlers that every Checkpointer starts with."""

from __future__ import annotations

__all__ = ("default_handlers",)

import jax
import numpy as np
from jax.core import Tracer

from penstock.handlers.leaves.array import ArrayHandler
from penstock.handlers.leaves.empty import EmptyHandler, EmptyNamedTuple
from penstock.handlers.leaves.handler_registry import HandlerRegistry
from penstock.handlers.leaves.numpy_array import NumpyHandler
from penstock.handlers.leaves.scalar import ScalarHandler, StringHandler


def default_handlers(*, entry_points: bool = True) -> HandlerRegistry:
    """Return a new registry with handlers for every type of leaf that jax knows, and for strings.

    Args:
        entry_points: Whether to look for handlers in other installed distributions, too.
    """
    registry = HandlerRegistry(entry_points=entry_points)
    array, scalar = ArrayHandler(), ScalarHandler()
    # Tracers and structs cannot be saved; they have a handler so that the error says why.
    arrays: tuple[type, ...] = (jax.Array, jax.ShapeDtypeStruct, Tracer)
    for type_ in arrays:
        registry.register(type_, array)
    numbers: tuple[type, ...] = (np.generic, int, float, bool, complex)
    for type_ in numbers:
        registry.register(type_, scalar)

    registry.register(np.ndarray, NumpyHandler())
    registry.register(str, StringHandler())
    registry.register(type(None), EmptyHandler("None"))
    registry.register(dict, EmptyHandler("Dict"))
    registry.register(list, EmptyHandler("List"))
    registry.register(tuple, EmptyHandler("Tuple"))
    registry.register(EmptyNamedTuple, EmptyHandler("NamedTuple"))
    return registry
