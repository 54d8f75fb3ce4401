"""Which linked bytes a save compares: all within some saves in a row, whoever else saves in between."""

from __future__ import annotations

import pytest

from penstock.kernel import Written
from penstock.kernel.pipeline import RunCaches
from penstock.stages.reuse.incremental import LITTLE_PARTS, Turn, due

MIB = 2**20
NAMES = [f"leaf{at}" for at in range(20)]
PARTS = [
    [Written(at, (0,), 4 * MIB * k, "d/1", 4 * MIB * (10 * at + k), 4 * MIB, 0) for k in range(at % 7 + 1)]
    for at in range(20)
]
ALL = {(at, part.start) for at, parts in enumerate(PARTS) for part in parts}


def chosen(turn: int, every: int, salt: int = 0) -> list[tuple[int, int]]:
    return [(number, part.start) for number, part in due(NAMES, PARTS, Turn(turn, salt), every)]


@pytest.mark.parametrize("every", [2, 3, 10])
def test_each_part_is_compared_once_in_so_many_saves(every: int) -> None:
    for cycle in range(3):
        found = [one for at in range(every) for one in chosen(cycle * every + at, every)]
        assert sorted(found) == sorted(ALL)


def test_the_shares_are_about_alike() -> None:
    sizes = [len(chosen(turn, 4)) for turn in range(40)]
    assert max(sizes) < len(ALL) / 2


@pytest.mark.parametrize("every", [2, 10])
def test_two_trees_that_are_saved_by_turns_are_both_compared_as_a_whole(every: int) -> None:
    for parity in (0, 1):
        found = {one for turn in range(parity, 40 * every, 2) for one in chosen(turn, every)}
        assert found == ALL


def test_a_process_that_begins_again_begins_elsewhere() -> None:
    assert len({tuple(chosen(0, 10, salt)) for salt in range(5)}) > 1
    assert RunCaches().salt != RunCaches().salt


def test_all_or_nothing_where_that_is_asked_for() -> None:
    assert set(chosen(5, 1)) == ALL
    assert chosen(5, 0) == []


def test_what_is_little_is_always_compared() -> None:
    little = [[Written(at, (0,), 0, "d/1", 100 * at, 100, 0)] for at in range(LITTLE_PARTS)]
    names = list(map(str, range(LITTLE_PARTS + 1)))
    assert len(due(names[:-1], little, Turn(3), 10)) == LITTLE_PARTS
    many = [*little, [Written(0, (0,), 0, "d/1", 0, 1, 0)]]
    assert len(due(names, many, Turn(3), 10)) < LITTLE_PARTS / 5
