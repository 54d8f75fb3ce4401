"""The handlers that every Checkpointer begins with."""

from __future__ import annotations

__all__ = ("default_handlers",)

import jax
import numpy as np
from jax.core import Tracer

from penstock.handlers.leaves.array import ArrayHandler
from penstock.handlers.leaves.empty import EmptyHandler, EmptyNamedTuple
from penstock.handlers.leaves.numpy_array import NumpyHandler
from penstock.handlers.leaves.scalar import ScalarHandler
from penstock.handlers.leaves.string import StringHandler
from penstock.kernel.plugins.handler_registry import HandlerRegistry


def default_handlers(*, entry_points: bool = True) -> HandlerRegistry:
    """Return a new registry with a handler for every leaf that jax itself understands, and for strings.

    Args:
        entry_points: Whether handlers of other distributions are found, too.
    """
    registry = HandlerRegistry(entry_points=entry_points)
    array, scalar = ArrayHandler(), ScalarHandler()
    # Tracers and structs are handled so that the error can say what is wrong with them.
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
