from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.common.batching import LEAST, STEP, Remaining, adjacent

MIB = 2**20


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        ([], []),
        ([1], [[1]]),
        ([1, 2, 4, 5, 7], [[1, 2], [4, 5], [7]]),
        ([3, 2, 1], [[3], [2], [1]]),
    ],
)
def test_runs_are_what_follows_each_other(items: list[int], runs: list[list[int]]) -> None:
    assert list(adjacent(items, lambda before, item: item == before + 1)) == runs


def messages(total: int, most: int, n_workers: int = 4) -> list[int]:
    """The sizes of the messages in which so many bytes go."""
    sizes: list[int] = []
    while total:
        sizes.append(min(total, Remaining(total, n_workers).message_bytes(most)))
        total -= sizes[-1]

    return sizes


def test_the_last_messages_are_smaller() -> None:
    sizes = [size // MIB for size in messages(128 * MIB, 16 * MIB)]
    assert sizes == [16, 16, 16, 16, 16, 12, 8, 6, 4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_they_are_not_if_it_is_unknown_how_much_is_to_come(nbytes: int) -> None:
    assert Remaining(nbytes, 4).message_bytes(16 * MIB) == 16 * MIB


@given(st.integers(1, 2**34), st.integers(1, 2**26), st.integers(1, 8))
def test_no_message_is_larger_than_its_share_or_smaller_than_is_worth_it(
    total: int, most: int, n_workers: int
) -> None:
    sizes = messages(min(total, 200 * most), most, n_workers)

    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= most
    for at, size in enumerate(sizes[:-1]):
        assert size == most or size % STEP == 0
        assert size >= min(most, LEAST)
        assert size <= max(sum(sizes[at:]) // n_workers, LEAST)
