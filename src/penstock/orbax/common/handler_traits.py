"""Properties of handlers and values that do not know penstock."""

from __future__ import annotations

__all__ = ("keeps", "leaf_size")

import sys


def leaf_size(value: object) -> int:
    """Bytes of a value: its `nbytes`, or else the size of the Python object."""
    nbytes = getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value)


def keeps(handler: object, class_: type, *names: str) -> bool:
    """Whether a handler is of a class and has that class's own methods of these names, not overridden."""
    return isinstance(handler, class_) and all(
        getattr(type(handler), name) is getattr(class_, name) and name not in vars(handler) for name in names
    )
