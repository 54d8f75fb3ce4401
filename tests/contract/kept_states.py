"""States whose every part can be asked whether something keeps it alive."""

from __future__ import annotations

__all__ = ("Holder", "States", "collector_off")

import gc
import threading
from collections.abc import Generator, Sequence
from typing import Any, TypeVar, final
from weakref import ref

import jax
import numpy as np
import pytest
from anyio import to_thread
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

T = TypeVar("T")
TURNS = 200
"""How often it is looked again. A worker thread lets go of a call just after its result is known."""


@pytest.fixture
def collector_off() -> Generator[None]:
    """Without it, what is in a reference cycle stays for ever."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@final
@register_pytree_with_keys_class
class Holder:
    """A node of a tree, of a class of the caller's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[Any, Any]], None]:
        return [(GetAttrKey("value"), self.value)], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> Holder:
        return cls(*children)


@final
class States:
    """Makes states, and knows which of them are alive: something refers to a leaf of it, or to a node."""

    def __init__(self) -> None:
        self._references: dict[int, list[ref[Any]]] = {}
        self._n_arrays = _n_live_arrays()

    def noted(self, number: int, value: T) -> T:
        """Return a value, noted as a part of a state."""
        self._references.setdefault(number, []).append(ref(value))
        return value

    def tree(self, number: int) -> dict[str, Any]:
        """A tree of small and of large leaves: packed, in pieces, copied and used in place."""
        return self.plain(number) | {"node": self.noted(number, Holder(self.array(number, 5)))}

    def plain(self, number: int) -> dict[str, Any]:
        """The same, of nodes that every format has."""
        return {
            "large": self.noted(number, np.full(300_000, number, np.uint8)),
            "large jax": self.array(number, 70_000),
            "many": [self.array(number, n) for n in range(1, 4)],
            "small": self.noted(number, np.full(7, number, np.int16)),
            "step": number,
        }

    def array(self, number: int, n: int) -> jax.Array:
        """An array of `n` numbers."""
        made: jax.Array = jax.device_put(np.full(n, number, np.float32))
        return self.noted(number, made)

    def note_all(self, number: int, tree: Any) -> None:
        """Note the leaves of a tree that was restored."""
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array | np.ndarray):
                self.noted(number, leaf)

    @property
    def alive(self) -> list[int]:
        """The numbers of those of which something is alive."""
        return [number for number, each in self._references.items() if any(one() is not None for one in each)]

    async def none_is_left(self) -> bool:
        """Whether all are gone, once threads have let go of what they did."""
        for _ in range(TURNS):
            if not self._any_left():
                return True

            await to_thread.run_sync(int)

        return not self._any_left()

    def none_is_left_now(self) -> bool:
        """The same, outside of an event loop."""
        for _ in range(TURNS):
            if not self._any_left():
                return True

            # Others go on meanwhile.
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

        return not self._any_left()

    def _any_left(self) -> bool:
        return bool(self.alive) or _n_live_arrays() > self._n_arrays


def _n_live_arrays() -> int:
    live: Any = jax.live_arrays  # it has no types
    return len(live())
