"""Orbax's own classes, accepted where this API has a class of the same name.

Libraries that were written for Orbax derive handlers and arguments from Orbax's base classes, and make
Orbax's `SaveArgs`. A program that uses them has imported Orbax, so what it made is recognised by asking
`sys.modules`. Orbax is never imported for it.
"""

from __future__ import annotations

__all__ = ("ORBAX", "Counterpart", "loaded_orbax")

import sys
from abc import ABCMeta
from typing import Any, ClassVar, Final

ORBAX: Final = "orbax.checkpoint"


class Counterpart(metaclass=ABCMeta):
    """Base of a class whose instances are also those of a class of Orbax, derived ones included."""

    _ORBAX_CLASS: ClassVar[tuple[str, str]]  # the public module of Orbax, and the name there

    @classmethod
    def __subclasshook__(cls, other: type, /) -> bool:
        place = vars(cls).get("_ORBAX_CLASS")  # a derived class stands for nothing but itself
        module = None if place is None else loaded_orbax(place[0])
        theirs = None if place is None else getattr(module, place[1], None)
        return True if theirs is not None and theirs in other.__mro__ else NotImplemented


def loaded_orbax(module: str = "") -> Any | None:
    """Return a module of Orbax if the program has imported it, and penstock does not stand in its place.

    Args:
        module: Its name below `orbax.checkpoint`.
    """
    found = sys.modules.get(f"{ORBAX}.{module}" if module else ORBAX)
    return found if found is not None and found.__name__.startswith(ORBAX) else None
