"""Which cases of a test with many of one kind `make test` runs; `make test-slow` runs the others. Pure."""

from __future__ import annotations

__all__ = ("kept",)

from collections import Counter
from collections.abc import Mapping, Sequence


def kept(cases: Sequence[Mapping[str, int]], one_in: int) -> Sequence[bool]:
    """Say of each case whether it is kept: about one in `one_in`.

    A choice of a parameter that so many cases have is in one that is kept.

    Args:
        cases: Of one test, in order: by the name of each parameter, which of its choices it is.
        one_in: How many cases one stands for.
    """
    counted = Counter([choice for case in cases for choice in case.items()])
    seen: set[tuple[str, int]] = set()
    found: list[bool] = []
    for number, case in enumerate(cases):
        # Every n-th case would have the same last choice, where there are n.
        is_regular = not _sum_of_digits(number, one_in) % one_in
        is_kept = is_regular or any(counted[it] >= one_in and it not in seen for it in case.items())
        if is_kept:
            seen |= {*case.items()}

        found.append(is_kept)

    return found


def _sum_of_digits(number: int, base: int) -> int:
    total = 0
    while number:
        number, digit = divmod(number, base)
        total += digit

    return total
