from __future__ import annotations

import pytest

from penstock.stages.messages.batching import adjacent


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
