"""Several named items saved as one checkpoint, and the kinds of items.

Source:
    ORBAX_FORMAT.md §5 for what is in the directory of each kind.
"""

from __future__ import annotations

__all__ = ("Array", "Composite", "Json", "NumpyRandomKey", "Proto", "PyTree", "RandomKey")

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, final

from penstock.kernel.errors import SpecError


@final
@dataclass(frozen=True, slots=True)
class PyTree:
    """A pytree. Values of no other kind are treated as one."""

    tree: object
    custom_metadata: Mapping[str, Any] | None = None  #: JSON values, kept with this tree


@final
@dataclass(frozen=True, slots=True)
class Json:
    """Values that JSON has: dicts with text keys, lists, texts, numbers, booleans, None."""

    value: object


@final
@dataclass(frozen=True, slots=True)
class Array:
    """One array or number."""

    value: object


@final
@dataclass(frozen=True, slots=True)
class RandomKey:
    """A jax PRNG key, typed or as uint32 data. Orbax restores typed keys with jax's default kind."""

    key: Any


@final
@dataclass(frozen=True, slots=True)
class NumpyRandomKey:
    """The state of numpy's generator: the tuple or the dict that `np.random.get_state` returns."""

    state: tuple[Any, ...] | dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Proto:
    """A protobuf message, kept as text. Needs protobuf: `pip install penstock[proto]`."""

    message: Any


@final
class Composite(Mapping[str, object]):
    """Named items, which are saved as one checkpoint: `Composite(state=tree, config=Json({...}))`.

    Args:
        items: By name; for names that are no Python names.
        **more: By name.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, object] | None = None, /, **more: object) -> None:
        if not isinstance(cast("object", items), Mapping | None):
            raise SpecError(f"items are a mapping from names to values, not {items!r}")

        self._items: dict[str, object] = {**(items or {}), **more}

    def __getitem__(self, name: str) -> object:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Composite({', '.join(self._items)})"
