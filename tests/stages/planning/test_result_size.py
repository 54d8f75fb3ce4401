"""The host memory that a result takes, added up leaf by leaf."""

from __future__ import annotations

import pytest

from penstock.errors import InsufficientMemoryError
from penstock.kernel.memory import free_memory
from penstock.stages.planning.restore_planner import ResultBytes


def test_leaves_that_fit_one_by_one_and_not_together_are_refused() -> None:
    each = free_memory() * 6 // 10
    result = ResultBytes("ckpt")
    result.add("['a']", each)

    with pytest.raises(InsufficientMemoryError, match=r"leaf is \['b'\]") as caught:
        result.add("['b']", each)

    assert caught.value.asked == 2 * each


def test_a_result_that_fits_is_not_refused() -> None:
    result = ResultBytes("ckpt")
    for number in range(1000):
        result.add(f"[{number}]", 1000)
