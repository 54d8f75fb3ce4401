"""What an error names in place of a name or a step that is not there."""

from __future__ import annotations

import pytest

from penstock.kernel.words import hint_at, in_short, near_steps


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("memroy", "did you mean 'memory'?"),
        ("MEMORY", "did you mean 'memory'?"),
        ("xyz", "there are memory, store"),
    ],
)
def test_a_hint_names_the_nearest_or_all(name: str, said: str) -> None:
    assert hint_at(name, ["memory", "store"]) == said


def test_a_hint_does_not_list_thousands() -> None:
    assert hint_at("x", [f"name{n}" for n in range(1000)]).endswith(", name19 and 980 more")
    assert hint_at("x", []) == "there are none"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (1700, "there are 1500 and 2000"),
        (3000, "the latest is 2000"),
        (1, "the first is 1000"),
    ],
)
def test_a_missing_step_is_answered_by_its_neighbours(step: int, said: str) -> None:
    assert near_steps(step, [2000, 1000, 1500]) == said
    assert near_steps(step, [step]) == "there are none"


@pytest.mark.parametrize(
    ("names", "said"),
    [("", ""), ("a", "a"), ("ab", "a and b"), ("abc", "a to c (3)"), ("abcd", "a to d (4)")],
)
def test_many_names_are_the_first_and_the_last(names: str, said: str) -> None:
    assert in_short([*names]) == said
