"""The base of every protocol that is looked for at run time.

Python 3.11 takes 20 to 50 µs for `isinstance` with a protocol, and a save or a restore of eight arrays asks
some eighty times: more than all else that it does before its first byte.
"""

from __future__ import annotations

__all__ = ("Capability",)

from abc import ABCMeta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    _Meta = ABCMeta
else:
    _Meta = type(Protocol)


class _CapabilityMeta(_Meta):
    """Remembers for each class which members it lacks, and looks only for those on the instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        if not cast("Any", cls)._is_protocol:  # a class that implements one
            return super().__instancecheck__(instance)

        kind: type = type(instance)
        lacking = _lacking(cls, kind)  # the instance may have them still
        return not lacking or all(_has(instance, name, cls) for name in lacking)


_ABSENT: Final = object()


@runtime_checkable
class Capability(Protocol, metaclass=_CapabilityMeta):
    """A capability that an object may have.

    `isinstance` says whether it has all members, and no method is None.
    """


@lru_cache(maxsize=4096)
def _lacking(protocol: type, kind: type) -> tuple[str, ...]:
    """Return the members of a protocol that are no attributes of a class."""
    members: set[str] = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False):
            members.update(vars(base), vars(base).get("__annotations__", ()))

    asked = [name for name in members if name == "__call__" or not name.startswith("_")]
    return tuple([name for name in asked if not _has(kind, name, protocol)])


def _has(owner: object, name: str, protocol: type) -> bool:
    found = getattr(owner, name, _ABSENT)
    return found is not _ABSENT and (found is not None or not callable(getattr(protocol, name, None)))
