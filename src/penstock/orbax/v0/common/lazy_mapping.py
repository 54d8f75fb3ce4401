"""A mapping that is computed when it is first used."""

from __future__ import annotations

__all__ = ("LazyMapping",)

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TypeVar, final

T = TypeVar("T")


@final
class LazyMapping(Mapping[str, T]):
    """The mapping that `make` returns, which is called at first use.

    Args:
        make: Returns the mapping.
    """

    def __init__(self, make: Callable[[], Mapping[str, T]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[str, T]:
        return self._make()

    def __getitem__(self, key: str) -> T:
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)
