"""Values of stored leaves: their statistics, and the differences of two checkpoints."""

from __future__ import annotations

__all__ = (
    "Difference",
    "Histogram",
    "Statistics",
    "compare_values",
    "is_array",
    "read_stored_values",
    "read_values",
    "statistics_of",
)

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeGuard, final

import numpy as np
import numpy.typing as npt
from anyio import create_task_group
from anyio.from_thread import check_cancelled

from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue, read_array
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts, open_item
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PenstockError, UnsupportedFormatError
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import KeyPath, StoredLeaf
from penstock.kernel.protocols.stores import Store

if TYPE_CHECKING:
    from penstock.checkpointer.checkpointer import Checkpointer

# Values are read in groups, so that checkpoints of any size can be compared.
GROUP_BYTES: Final = 256 * 2**20
N_BINS: Final = 32


@final
@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of finite values in intervals of one width."""

    counts: tuple[int, ...]
    low: float
    high: float


@final
@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the values of an array. Those not finite are counted, and left out of the rest."""

    n: int
    n_nan: int
    n_infinite: int
    n_zero: int
    least: float | None
    greatest: float | None
    mean: float | None
    std: float | None
    histogram: Histogram | None


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of two arrays of one shape."""

    n_different: int
    n: int
    largest: float  #: of the absolute differences; NaN if only NaNs, or texts, differ
    at: tuple[int, ...]  #: where that is
    values: tuple[str, str]  #: what is there
    moved: float = math.inf  #: the norm of the difference, relative to that of the first; infinite for texts


async def read_values(
    checkpointer: Checkpointer, path: str, item: str | None, leaves: Sequence[LeafFacts]
) -> AsyncIterator[dict[KeyPath, Any]]:
    """Yield values of leaves by their keys, some 256 MiB at a time: NumPy arrays, and texts as they are.

    Raises:
        PenstockError: What a restore raises.
    """
    for group in _groups(leaves):
        wanted = {leaf.keys for leaf in group}
        found: dict[KeyPath, Any] = {}
        stream = checkpointer.stream(path, item=item, only=wanted.__contains__)
        async for keys, value in stream:
            found[keys] = _as_plain(value)

        yield found


async def read_stored_values(
    store: Store, threads: Threads, item: ItemFacts, leaves: Sequence[LeafFacts]
) -> AsyncIterator[dict[KeyPath, Any]]:
    """Yield the same without jax, which takes a second to import.

    Args:
        store: Where the checkpoint is.
        threads: For blocking calls.
        item: What the leaves are in.
        leaves: What to read.

    Raises:
        PenstockError: If the medium refuses, or what is there is damaged.
    """
    opened = await threads.run(open_item, store, item.path, item.name or None)
    stored = {leaf.info.keys: leaf for leaf in opened.leaves}
    for group in _groups(leaves):
        reading = _GroupReading(store, opened, [stored[leaf.keys] for leaf in group])
        try:
            yield await reading.run(threads)
        except UnsupportedFormatError:
            # Stages of the configuration may know what is there.
            from penstock.checkpointer.checkpointer import Checkpointer

            async with Checkpointer() as checkpointer:
                async for values in read_values(checkpointer, item.path, item.name or None, group):
                    yield values


_N_READERS: Final = 4


@final
@dataclass(frozen=True, slots=True)
class _GroupReading:
    """Reads leaves of one item, by several threads."""

    store: Store
    opened: StoredCheckpoint
    leaves: Sequence[StoredLeaf]
    values: dict[KeyPath, Any] = field(default_factory=dict[KeyPath, Any])
    failures: list[PenstockError] = field(default_factory=list[PenstockError])

    async def run(self, threads: Threads) -> dict[KeyPath, Any]:
        async with create_task_group() as tasks:
            for start in range(min(_N_READERS, len(self.leaves))):
                tasks.start_soon(threads.run, self._read, self.leaves[start::_N_READERS])

        if self.failures:
            raise self.failures[0]

        return self.values

    def _read(self, leaves: Sequence[StoredLeaf]) -> None:
        files = SourceFiles(self.store)
        try:
            for leaf in leaves:
                check_cancelled()
                self.values[leaf.info.keys] = _stored_value(files, self.opened, leaf)
        except PenstockError as error:
            self.failures.append(error)  # raised as it is, and not in a group
        finally:
            files.close()


def _stored_value(files: SourceFiles, opened: StoredCheckpoint, leaf: StoredLeaf) -> Any:
    if leaf.spec.text is not None or leaf.spec.shape is None:
        return leaf.spec.text

    return read_array(StoredValue(files, opened, leaf))


def statistics_of(values: npt.NDArray[Any]) -> Statistics | None:
    """Return the statistics of an array; None if it is none of numbers."""
    plain = _as_floats(values)
    if plain is None:
        return None

    finite = plain[np.isfinite(plain)]
    n_nan = int(np.isnan(plain).sum())
    counts = (plain.size, n_nan, plain.size - n_nan - finite.size, int((finite == 0).sum()))
    if not finite.size:
        return Statistics(*counts, None, None, None, None, None)

    low, high = float(finite.min()), float(finite.max())
    with np.errstate(over="ignore", invalid="ignore"):  # of values near the greatest float
        mean, std = float(finite.mean()), float(finite.std())
        histogram = _histogram(finite, low, high)

    return Statistics(*counts, low, high, mean, std, histogram)


def compare_values(first: Any, second: Any) -> Difference | None:
    """Return how two values of one shape and dtype differ; None if they are the same, NaNs included."""
    if not (is_array(first) and is_array(second)):
        return None if first == second else Difference(1, 1, float("nan"), (), (repr(first), repr(second)))

    return _compare_arrays(first, second)


def is_array(value: object) -> TypeGuard[npt.NDArray[Any]]:
    """True if a value is an array, and no text."""
    return isinstance(value, np.ndarray)


def _compare_arrays(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> Difference | None:
    if first.tobytes() == second.tobytes():
        return None

    ours, theirs = _as_floats(first), _as_floats(second)
    if ours is None or theirs is None:
        unequal = np.asarray(first != second)
        at = tuple(int(i) for i in np.unravel_index(int(unequal.argmax()), first.shape))
        n = int(unequal.sum())
        return Difference(n, first.size, float("nan"), at, (str(first[at]), str(second[at]))) if n else None

    unequal = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
    n = int(unequal.sum())
    if not n:
        return None  # zeros of both signs, NaNs of several kinds

    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(unequal, np.abs(ours - theirs), 0)
    ranked = np.where(np.isnan(distance), np.inf, distance)
    at = tuple(int(i) for i in np.unravel_index(int(ranked.argmax()), first.shape))
    values = (str(first[at]), str(second[at]))
    return Difference(n, first.size, float(distance[at]), at, values, _moved(ours, distance))


def _moved(first: npt.NDArray[Any], distance: npt.NDArray[Any]) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        was, by = (float(np.linalg.norm(values.reshape(-1))) for values in (first, distance))

    if math.isnan(was) or math.isnan(by) or not was:
        return math.inf

    return by / was


def _histogram(finite: npt.NDArray[Any], low: float, high: float) -> Histogram | None:
    if not np.isfinite(high - low):
        return None

    counts, _ = np.histogram(
        finite, bins=N_BINS if high > low else 1, range=(low, high) if high > low else None
    )
    return Histogram(tuple(int(count) for count in counts), low, high)


def _as_floats(values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return numbers as float64, of complex ones the absolute values; None for what is no number."""
    if values.dtype.kind == "c":
        return np.asarray(np.abs(values))
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return None


def _as_plain(value: Any) -> Any:
    """Return a restored leaf without jax: an array, or a text."""
    if value is None or isinstance(value, str):
        return value

    dtype = getattr(value, "dtype", None)
    if dtype is not None and not isinstance(dtype, np.dtype):  # a typed random key
        from jax.random import key_data

        value = key_data(value)

    return np.asarray(value)


def _groups(leaves: Sequence[LeafFacts]) -> Iterator[Sequence[LeafFacts]]:
    group: list[LeafFacts] = []
    nbytes = 0
    for leaf in leaves:
        if group and nbytes + leaf.nbytes > GROUP_BYTES:
            yield group
            group, nbytes = [], 0

        group.append(leaf)
        nbytes += leaf.nbytes

    if group:
        yield group
