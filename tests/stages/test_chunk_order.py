"""The elements of an array that was stored chunk by chunk come back in C order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel import LeafSpec
from penstock.stages.read import put_in_order

AXES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=4)


def spec_of(axes: list[tuple[int, int]], itemsize: int) -> LeafSpec:
    """An array of so many chunks of so many elements along each axis."""
    shape = tuple(count * size for count, size in axes)
    return LeafSpec("np.ndarray", shape, f"V{itemsize}", itemsize, tuple(size for _, size in axes))


def stored(array: np.ndarray[tuple[int, ...], np.dtype[np.void]], spec: LeafSpec) -> bytes:
    """Its chunks, one after another."""
    found = b""
    for index in itertools.product(*map(range, spec.grid_shape)):
        part = tuple(slice(at * n, (at + 1) * n) for at, n in zip(index, spec.chunk_shape, strict=True))
        found += array[part].tobytes()

    return found


@given(axes=AXES, itemsize=st.sampled_from([1, 2, 3, 4, 8, 16]), n=st.integers(1, 3), gap=st.integers(0, 9))
def test_any_chunks_of_any_leaves(axes: list[tuple[int, int]], itemsize: int, n: int, gap: int) -> None:
    spec = spec_of(axes, itemsize)
    numbers = np.random.default_rng(0).integers(0, 256, (n, spec.nbytes), np.uint8)
    arrays = [row.view(f"V{itemsize}").reshape(spec.shape or ()) for row in numbers]
    data = bytearray(b"".join([bytes(gap) + stored(array, spec) for array in arrays]))
    starts = [gap + at * (gap + spec.nbytes) for at in range(n)]

    put_in_order([spec] * n, memoryview(data), starts)

    assert bytes(data) == b"".join([bytes(gap) + array.tobytes() for array in arrays])


def test_leaves_of_several_specs() -> None:
    columns, rows = spec_of([(1, 2), (2, 1)], 1), spec_of([(2, 1), (1, 2)], 1)
    data = bytearray(b"acbdabcdacbdacbd")

    put_in_order([columns, rows, columns, columns], memoryview(data), [0, 4, 8, 12])

    assert bytes(data) == b"abcd" * 4


@pytest.mark.parametrize("first", [0, 1])
def test_only_what_must_move_is_written(first: int) -> None:
    # Mapped memory and third parties' buffers may be read-only.
    spec = spec_of([(1, 1), (4, 2), (1, 3)], 2)
    put_in_order([spec] * 2, memoryview(bytes(96 + first)), [first, first + 48])
