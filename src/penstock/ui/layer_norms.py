"""The norm of each layer at some steps of a run, from the values that are stored.

Read for the page while it is looked at, one step at a time, and no more bytes than a budget has.
"""

from __future__ import annotations

__all__ = ("LayerNorms", "layers_to_measure")

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.formats.leaf_table import show_key_path
from penstock.inspection.leaf_values import is_array, read_values
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts, read_items
from penstock.inspection.texts import one_line
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.protocols.stores import Store

BUDGET_BYTES: Final = 2**29
MOST_STEPS: Final = 24
MOST_LAYERS: Final = 24
_SLICE: Final = 2**20  #: values that are squared at once
_WEIGHTS: Final = "params"  #: if a tree has this next to its optimizer state, it alone is read


@final
class LayerNorms:
    """The norms of one run. Used from one event loop, one call at a time.

    Args:
        store: Where it is.
        budget_bytes: How many bytes of arrays may be read; `extend` allows as many again.
    """

    __slots__ = ("_allowed", "_budget_bytes", "_found", "_read_bytes", "_step_bytes", "_store", "_threads")

    def __init__(self, store: Store, budget_bytes: int = BUDGET_BYTES) -> None:
        self._store = store
        self._threads = Threads(1)
        self._budget_bytes = self._allowed = budget_bytes
        self._found: dict[tuple[str, float | None], dict[str, float | None] | str] = {}
        self._read_bytes = self._step_bytes = 0

    def extend(self) -> None:
        """Allow as many bytes again as at the beginning; of a large model, enough for two steps."""
        self._allowed = self._read_bytes + max(self._budget_bytes, 2 * self._step_bytes)

    @staticmethod
    def waiting() -> dict[str, Any]:
        """Return the answer while nothing is to be read yet."""
        return {"norms": {}, "problems": {}, "n_unread": 0, "n_steps": 0, "is_waiting": True}

    async def read_one(self, finished: Mapping[str, tuple[str, float | None]]) -> dict[str, Any]:
        """Read one more step, if there is room in the budget, and return all that is known.

        Args:
            finished: The path of each finished step, ascending, and when it was committed. A step that was
                saved anew is read again.
        """
        found = {
            name: self._found[name, committed]
            for name, (_, committed) in finished.items()
            if (name, committed) in self._found
        }
        chosen = _chosen(list(finished), found)
        unread = [name for name in chosen if name not in found]
        if unread and self._has_room:
            # From both ends: two points are a line already.
            name = unread[0] if len(unread) % 2 else unread[-1]
            path, committed = finished[name]
            result = await self._read(path)
            if result is not None:
                found[name] = self._found[name, committed] = result
                unread.remove(name)

        shown = [(name, found[name]) for name in chosen if name in found]
        return {
            "norms": {name: norms for name, norms in shown if isinstance(norms, dict)},
            "problems": {name: problem for name, problem in shown if isinstance(problem, str)},
            "n_unread": len(unread),
            "n_steps": len(finished),
            "is_waiting": False,
            "is_spent": bool(unread) and not self._has_room,
            "read_bytes": self._read_bytes,
            "allowed_bytes": self._allowed,
            "step_bytes": self._step_bytes,
        }

    @property
    def _has_room(self) -> bool:
        return self._read_bytes + self._step_bytes <= self._allowed

    async def _read(self, path: str) -> dict[str, float | None] | str | None:
        """Return the norm of each layer, None of one that is not finite; or why there is none.

        None if the budget has no room for it.
        """
        try:
            items = await read_items(self._store, self._threads, path)
            item = max(items, key=lambda one: one.nbytes)
            layers = layers_to_measure(item.leaves)
            leaves = [leaf for inside in layers.values() for leaf in inside]
            self._step_bytes = max(self._step_bytes, sum([leaf.nbytes for leaf in leaves]))
            if not self._has_room:
                return None

            self._read_bytes += self._step_bytes
            squares = await self._squares(item, leaves)
        except PenstockError as error:
            return one_line(str(error))

        norms: dict[str, float | None] = {}
        for name, inside in layers.items():
            total = math.fsum([squares.get(leaf.keys, 0.0) for leaf in inside])
            norms[one_line(name)] = math.sqrt(total) if math.isfinite(total) else None

        return norms

    async def _squares(self, item: ItemFacts, leaves: Sequence[LeafFacts]) -> dict[KeyPath, float]:
        squares: dict[KeyPath, float] = {}
        async with Checkpointer() as checkpointer:
            async for values in read_values(checkpointer, item.path, item.name or None, leaves):
                for keys, value in values.items():
                    squares[keys] = await self._threads.run(_squared, value)

        return squares


def _chosen(names: Sequence[str], found: Collection[str]) -> Sequence[str]:
    """Return steps that are about evenly apart, those that were read already where that fits."""
    apart = max((len(names) - 1) / (MOST_STEPS - 1), 1.0)
    known = [at for at, name in enumerate(names) if name in found]
    chosen: set[int] = set()
    for target in [round(n * apart) for n in range(min(MOST_STEPS, len(names)))]:
        near = min(known, key=lambda at: abs(at - target), default=-1)
        chosen.add(near if near >= 0 and abs(near - target) <= apart / 2 else target)

    return [names[at] for at in sorted(chosen)]


def layers_to_measure(leaves: Sequence[LeafFacts], most: int = MOST_LAYERS) -> dict[str, list[LeafFacts]]:
    """Return the leaves of floats by layer: the lowest nodes with nodes in them, if these are not too many.

    Args:
        leaves: Of one item.
        most: How many layers there may be.
    """
    floats = [leaf for leaf in leaves if leaf.shape and _is_float(leaf.dtype)]
    weights = [leaf for leaf in floats if len(leaf.keys) > 1 and leaf.keys[0] == _WEIGHTS]
    floats = weights or floats
    depth = 1
    for deeper in range(2, max([len(leaf.keys) for leaf in floats], default=0) + 1):
        # A layer is more than one leaf of its own: its kernel and its bias belong together.
        if len({leaf.keys[: min(deeper, max(len(leaf.keys) - 1, 1))] for leaf in floats}) > most:
            break

        depth = deeper

    layers: defaultdict[str, list[LeafFacts]] = defaultdict(list)
    for leaf in floats:
        at = min(depth, max(len(leaf.keys) - 1, 1))
        layers[show_key_path(leaf.keys[:at], leaf.kinds[:at]) or "(the whole)"].append(leaf)

    # One that has more layers than there is room for even at the top is shown by its largest.
    largest = sorted(layers, key=lambda name: -sum([leaf.nbytes for leaf in layers[name]]))[:most]
    return {name: layers[name] for name in layers if name in set(largest)}


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _squared(value: Any) -> float:
    """Return the sum of the squares of an array of floats."""
    if not is_array(value):
        return 0.0

    flat: npt.NDArray[Any] = value.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        parts = (flat[at : at + _SLICE].astype(np.float64) for at in range(0, flat.size, _SLICE))
        return math.fsum([float(np.dot(part, part)) for part in parts])
