"""Elements are moved bit for bit, whatever the shapes and the strides."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.plain_rules import same_bits

from penstock.stages.rules.arrays import move

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float32, np.complex128])
@pytest.mark.parametrize("shape", [(), (5,), (1, 1), (700, 3), (513, 601), (2, 300, 515), (300, 1, 257)])
def test_a_part_of_any_order_is_moved(shape: tuple[int, ...], dtype: Any) -> None:
    for axes in itertools.permutations(range(len(shape))):
        bits = RANDOM.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
        part = bits.view(dtype).reshape(shape).transpose(axes)
        room: Any = np.zeros([size + 3 for size in part.shape], dtype)
        place = room[(*[slice(1, 1 + size) for size in part.shape], ...)]
        move(part, place)
        assert same_bits(place, part)
        place[...] = 0
        assert not room.any()


def test_one_value_is_moved_to_many_places() -> None:
    to = np.zeros((300, 400), np.float32)
    move(np.broadcast_to(np.float32(2.5), to.shape), to)
    assert (to == 2.5).all()
