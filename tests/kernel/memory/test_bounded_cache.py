"""The cache keeps what was used last, within its entries and its bytes."""

from __future__ import annotations

import copy
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity


def cache(entries: int = 3, nbytes: int = 100) -> BoundedCache[str, str]:
    return BoundedCache(entries, nbytes)


def filled(keys: str, nbytes: int = 10, **bounds: int) -> BoundedCache[str, str]:
    found = cache(**bounds)
    for key in keys:
        found.put(key, key.upper(), nbytes)

    return found


def kept(found: BoundedCache[str, str]) -> set[str]:
    return {key for key in "abcdef" if found.get(key) is not None}


def test_a_copy_has_the_same_bounds_and_is_empty() -> None:
    other = copy.deepcopy(filled("ab", entries=2))
    assert len(other) == 0
    for key in "abc":
        other.put(key, key.upper(), 10)
    assert kept(other) == {"b", "c"}


def test_what_is_put_is_found_until_it_is_popped() -> None:
    found = filled("ab")
    assert (found.get("a"), found.get("b"), found.get("c")) == ("A", "B", None)
    assert (found.pop("a"), found.pop("a"), found.get("a")) == ("A", None, None)
    assert (len(found), found.nbytes) == (1, 10)


def test_the_entry_used_longest_ago_goes_first() -> None:
    found = filled("abc")
    found.get("a")
    found.put("d", "D", 10)
    assert kept(found) == {"a", "c", "d"}


def test_bytes_are_bounded() -> None:
    found = filled("abc", 40, entries=10)
    assert (kept(found), found.nbytes) == ({"b", "c"}, 80)
    found.put("d", "D", 100)
    assert (kept(found), found.nbytes) == ({"d"}, 100)


def test_a_value_beyond_the_bound_is_not_kept_and_drives_out_nothing_but_its_forerunner() -> None:
    found = filled("ab")
    found.put("a", "A", 101)
    assert (kept(found), found.nbytes) == ({"b"}, 10)


def test_another_value_takes_the_place_of_the_first() -> None:
    found = filled("a", 40)
    found.put("a", "other", 50)
    assert (found.get("a"), len(found), found.nbytes) == ("other", 1, 50)


def test_a_value_is_made_once() -> None:
    found = cache()
    made: list[str] = []

    def make() -> str:
        made.append("x")
        return "X"

    assert [found.get_or_make("a", make, len) for _ in range(3)] == ["X"] * 3
    assert (made, found.nbytes) == (["x"], 1)


def test_what_fails_is_not_kept() -> None:
    found = cache()

    def fail() -> str:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # nothing else can raise it
        found.get_or_make("a", fail, len)
    assert len(found) == 0


def test_a_value_is_changed_in_one_step() -> None:
    found: BoundedCache[str, int] = BoundedCache(3, 10_000)

    def add_one(before: int | None) -> tuple[int, int]:
        return (before or 0) + 1, 8

    def add_many() -> None:
        for _ in range(500):
            found.change("a", add_one)

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (found.get("a"), found.nbytes) == (2000, 8)
    found.change("a", lambda _: None)
    assert (len(found), found.nbytes) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60))), st.integers(0, 4))
def test_no_bound_is_ever_passed(puts: list[tuple[str, int]], entries: int) -> None:
    found = cache(entries)
    for key, nbytes in puts:
        found.put(key, key, nbytes)
        assert len(found) <= entries
        assert found.nbytes <= 100


def test_keys_by_identity() -> None:
    first, second = [1], [1]
    assert ByIdentity(first) == ByIdentity(first)
    assert hash(ByIdentity(first, second)) == hash(ByIdentity(first, second))
    assert ByIdentity(first) != ByIdentity(second)
    assert ByIdentity(first) != ByIdentity(first, first)
    assert ByIdentity(first) != first
