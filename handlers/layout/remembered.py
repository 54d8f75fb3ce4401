"""Documents that were decoded before: the checkpoints of one training differ in their arrays alone."""

from __future__ import annotations

__all__ = ("RememberedDocuments",)

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, TypeVar, cast, final

T = TypeVar("T")

_MOST: Final = 2  # documents of each kind
_LONGEST: Final = 64 * 2**20  # bytes


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedDocuments:
    """Decodes documents, the last few only once. Thread-safe.

    A document is known again by all of its bytes, so what was decoded can never be that of another.
    Nobody may change what is returned.
    """

    _known: dict[str, list[tuple[bytes, object]]] = field(
        default_factory=dict[str, list[tuple[bytes, object]]], init=False, repr=False
    )
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def decode(self, kind: str, decoder: Callable[[str, bytes], T], path: str, data: bytes) -> T:
        """Return `decoder(path, data)`, now or from before.

        Args:
            kind: What document it is; one kind has one decoder.
            decoder: Depends on `data` alone; `path` is for its errors, which are not remembered.
            path: Where `data` was found.
            data: The content of the file.
        """
        with self._lock:
            known = list(self._known.get(kind, ()))

        for found, decoded in known:
            if found == data:
                return cast("T", decoded)

        made = decoder(path, data)
        if len(data) <= _LONGEST:
            with self._lock:
                self._known[kind] = [(data, made), *self._known.get(kind, ())][:_MOST]

        return made
