"""What is left of a test with many cases has each choice of each parameter."""

from __future__ import annotations

import itertools

import pytest
from tests.thinning import kept


@pytest.mark.parametrize("sizes", [(3, 4), (2, 40), (4, 4, 4), (5, 3, 2, 2), (64,), (64, 1)])
@pytest.mark.parametrize("one_in", [2, 3, 4, 7])
def test_each_choice_that_enough_cases_have_is_kept(sizes: tuple[int, ...], one_in: int) -> None:
    cases = [dict(zip("abcd", at, strict=False)) for at in itertools.product(*map(range, sizes))]

    left = [case for case, is_kept in zip(cases, kept(cases, one_in), strict=True) if is_kept]

    for name, size in zip("abcd", sizes, strict=False):
        if len(cases) // size >= one_in:
            assert {case[name] for case in left} == {*range(size)}

    assert len(left) <= len(cases) / one_in + 1 + sum(
        [size for size in sizes if len(cases) // size >= one_in]
    )
