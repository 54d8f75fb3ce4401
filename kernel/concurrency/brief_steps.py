"""Work on long columns in steps, each of which holds the interpreter for a millisecond or so.

A call such as `sorted(keys)` or `b"".join(pieces)` does not let other threads run before it returns, the
event loop's among them: of 600,000 keys each takes 20 ms to 200 ms. Pure.
"""

from __future__ import annotations

__all__ = (
    "STEP",
    "STEP_BYTES",
    "all_neighbours",
    "append",
    "as_slice",
    "cuts",
    "drop",
    "integers",
    "joined",
    "parts_of",
    "rows_in_order",
)

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import islice
from operator import lt
from typing import Any, Final, TypeVar

T = TypeVar("T")

STEP: Final = 4096
"""Objects that are looked at in one call."""

STEP_BYTES: Final = 1 << 20
"""Bytes that are copied in one call."""


def parts_of(items: Sequence[T], step: int = STEP) -> Iterator[Sequence[T]]:
    """Yield items in slices of at most `step`."""
    for at in range(0, len(items), step):
        yield items[at : at + step]


def all_neighbours(holds: Callable[[Any, Any], bool], items: Sequence[object]) -> bool:
    """Return whether something holds of each item and the next one."""
    for at in range(0, len(items) - 1, STEP):
        part = items[at : at + STEP + 1]
        if not all(map(holds, part, islice(part, 1, None))):
            return False

    return True


def cuts(sizes: Sequence[int], most: int, most_items: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield where groups begin and end that weigh at most `most`; what weighs more is alone."""
    start = nbytes = 0
    for stop, size in enumerate(sizes):
        nbytes += size
        if stop > start and (nbytes > most or stop - start == most_items):
            yield start, stop
            start, nbytes = stop, size

    if len(sizes) > start:
        yield start, len(sizes)


def as_slice(numbers: Sequence[int]) -> slice | None:
    """Return the slice that takes just these places in this order; None if there is a gap, or none of them.

    A slice of a range is a range: the numbers of a million leaves, an object each, would take 40 MB.
    """
    if not numbers or numbers[-1] - numbers[0] != len(numbers) - 1:
        return None

    ascend = isinstance(numbers, range) or all(map(lt, numbers, islice(numbers, 1, None)))
    return slice(numbers[0], numbers[-1] + 1) if ascend else None


def integers(numbers: Iterable[int]) -> array[int]:
    """Return numbers as 64-bit integers in memory, to be taken over without a copy."""
    found, rest, before = array("q"), iter(numbers), -1
    while len(found) > before:  # the rest has ended where nothing came of it
        before = len(found)
        found.extend(islice(rest, STEP))

    return found


def joined(pieces: Sequence[bytes]) -> bytes:
    """Join many pieces."""
    stream = BytesIO()  # whose content is taken without a copy
    for part in parts_of(pieces):
        append(stream, b"".join(part))

    return stream.getvalue()


def append(stream: BytesIO, data: bytes) -> None:
    """Write many bytes to a stream in memory, which copies them."""
    with memoryview(data) as view:
        stream.writelines(view[at : at + STEP_BYTES] for at in range(0, len(view), STEP_BYTES))


def drop(items: list[Any]) -> None:
    """Empty a list of objects that are referenced only here, as its end would do in one step."""
    while items:
        del items[-STEP:]


def rows_in_order(keys: Sequence[bytes]) -> Sequence[int]:
    """Return the number of each key, in ascending order of the keys; equal ones stay as they are.

    Nearly sorted keys are fastest; sorted ones are only looked at.
    """
    if all_neighbours(lt, keys):
        return range(len(keys))

    runs = [
        sorted(range(at, min(at + STEP, len(keys))), key=keys.__getitem__) for at in range(0, len(keys), STEP)
    ]
    while len(runs) > 1:
        odd = runs.pop() if len(runs) % 2 else None
        runs = [_merged(a, b, keys) for a, b in zip(runs[::2], runs[1::2], strict=True)]
        if odd is not None:
            runs.append(odd)

    return runs[0]


def _merged(a: list[int], b: list[int], keys: Sequence[bytes]) -> list[int]:
    """Merge two sorted runs of rows; those of `a` come first among equal ones."""
    key = keys.__getitem__
    found: list[int] = []
    at, there = 0, 0
    while at < len(a) and there < len(b):
        end, stop = min(at + STEP, len(a)), min(there + STEP, len(b))
        # Of both runs, what is below the smaller of the two ends has come: nothing later is.
        if keys[a[end - 1]] <= keys[b[stop - 1]]:
            stop = bisect_left(b, keys[a[end - 1]], there, stop, key=key)
        else:
            end = bisect_right(a, keys[b[stop - 1]], at, end, key=key)

        some = a[at:end] + b[there:stop]
        if at < end and there < stop:
            some.sort(key=key)

        found += some
        at, there = end, stop

    for rest in (a[at:], b[there:]):
        found += rest

    return found
