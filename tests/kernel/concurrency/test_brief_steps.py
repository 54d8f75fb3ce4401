"""Work on long columns in steps: what comes out is that of one call."""

from __future__ import annotations

import operator
import random
from io import BytesIO

import pytest

from penstock.kernel.concurrency.brief_steps import (
    STEP,
    STEP_BYTES,
    all_neighbours,
    append,
    drop,
    integers,
    joined,
    rows_in_order,
)

LENGTHS = [0, 1, 2, STEP - 1, STEP, STEP + 1, 2 * STEP, 3 * STEP + 7]


def random_keys(count: int, distinct: int) -> list[bytes]:
    numbers = random.Random(count)
    return [b"%d" % numbers.randrange(distinct) for _ in range(count)]


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("distinct", [3, 10**9])
def test_rows_are_in_order_and_equal_keys_stay_as_they_are(count: int, distinct: int) -> None:
    keys = random_keys(count, distinct)

    assert list(rows_in_order(keys)) == sorted(range(count), key=keys.__getitem__)


@pytest.mark.parametrize("count", LENGTHS)
def test_keys_in_order_are_not_sorted(count: int) -> None:
    assert rows_in_order(sorted(b"%09d" % at for at in range(count))) == range(count)


def test_runs_of_which_one_ends_early_are_merged() -> None:
    keys = [b"%06d" % at for at in [*range(STEP, 3 * STEP), *range(STEP), *range(3 * STEP, 5 * STEP + 1)]]

    assert [keys[row] for row in rows_in_order(keys)] == sorted(keys)


@pytest.mark.parametrize("count", LENGTHS)
def test_columns_are_those_of_one_call(count: int) -> None:
    keys = random_keys(count, 10**9)

    assert list(integers(range(count))) == list(range(count))
    assert list(integers(map(len, keys))) == list(map(len, keys))
    assert joined(keys) == b"".join(keys)
    drop(keys)
    assert keys == []


@pytest.mark.parametrize("at", [1, STEP - 1, STEP, STEP + 1, 2 * STEP])
def test_neighbours_are_compared_across_steps(at: int) -> None:
    numbers = list(range(2 * STEP + 1))
    assert all_neighbours(operator.lt, numbers)

    numbers[at] = numbers[at - 1]
    assert not all_neighbours(operator.lt, numbers)


@pytest.mark.parametrize("nbytes", [0, 1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES])
def test_many_bytes_are_appended_whole(nbytes: int) -> None:
    stream, data = BytesIO(b"before"), random.Random(nbytes).randbytes(nbytes)
    stream.seek(0, 2)

    append(stream, data)
    assert stream.getvalue() == b"before" + data
