"""Several named items: what a `CompositeCheckpointHandler` takes and returns."""

from __future__ import annotations

__all__ = ("Composite",)

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any


class _NoItemError(KeyError, AttributeError):
    """There is no item of that name. Both errors, for both ways to look it up."""


class Composite(Mapping[str, Any]):
    """A mapping whose values are attributes, too: `Composite(state=tree).state`. Immutable.

    An item with the name of a method (`items`, `keys`) is only found by its key.

    Args:
        **items: By name.

    Raises:
        ValueError: If a name begins with two underscores.
    """

    _items: Mapping[str, Any]

    def __init__(self, **items: Any) -> None:
        reserved = next((name for name in items if name.startswith("__")), None)
        if reserved is not None:
            raise ValueError(f'Composite keys cannot start with "__", as {reserved!r} does')

        object.__setattr__(self, "_items", items)

    def __getitem__(self, key: str) -> Any:
        if key not in self._items:
            raise _NoItemError(f"Unknown key: {key}. Available keys: {list(self._items)}")

        return self._items[key]

    def __getattr__(self, key: str) -> Any:
        if key == "_items":  # while it is copied or unpickled
            raise AttributeError(key)

        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise ValueError("a Composite cannot be changed; make a new one")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __repr__(self) -> str:
        return f"Composite({dict(self._items)!r})"

    def keys(self) -> KeysView[str]:
        return self._items.keys()

    def values(self) -> ValuesView[Any]:
        return self._items.values()

    def items(self) -> ItemsView[str, Any]:
        return self._items.items()

    def get(self, key: str, default: Any = None) -> Any:
        return self._items.get(key, default)

    def __and__(self, other: Mapping[str, Any]) -> Composite:
        return Composite(**{key: value for key, value in self._items.items() if key in other})

    def __or__(self, other: Mapping[str, Any]) -> Composite:
        return Composite(**{**self._items, **other})
