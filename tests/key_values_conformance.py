"""What every coordination service must do, whoever provides it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from penstock.kernel.protocols import KeyValues


class KeyValuesConformance(ABC):
    """Inherit this, and make a service for each test."""

    @abstractmethod
    def make_views(self, count: int) -> list[KeyValues]:
        """Return what `count` processes see of one new service."""

    def test_a_value_is_seen_by_all(self) -> None:
        one, other = self.make_views(2)
        assert one.put("a/b", b"x\0\xff", False)
        assert other.wait("a/b", 5.0) == b"x\0\xff"

    def test_the_first_value_stays_unless_it_is_replaced(self) -> None:
        one, other = self.make_views(2)
        assert one.put("a", b"1", False)
        assert not other.put("a", b"2", False)
        assert other.wait("a", 0.0) == b"1"
        assert other.put("a", b"3", True)
        assert one.wait("a", 0.0) == b"3"

    def test_of_many_at_once_one_is_the_first(self) -> None:
        views = self.make_views(4)
        won: list[int] = []

        def put(at: int) -> None:
            if views[at].put("a", b"%d" % at, False):
                won.append(at)

        threads = [threading.Thread(target=put, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert [views[0].wait("a", 0.0)] == [b"%d" % at for at in won]

    def test_a_wait_ends_when_the_value_comes(self) -> None:
        one, other = self.make_views(2)
        found: list[bytes | None] = []
        waiting = threading.Thread(target=lambda: found.append(one.wait("a", 30.0)))
        waiting.start()
        other.put("a", b"x", False)
        waiting.join(30.0)
        assert found == [b"x"]

    def test_a_wait_for_nothing_ends_without_a_value(self) -> None:
        (one,) = self.make_views(1)
        assert one.wait("a", 0.0) is None
        assert one.wait("a", 0.05) is None

    def test_values_are_listed_by_what_follows_the_prefix(self) -> None:
        one, other = self.make_views(2)
        for key in ("a/1", "a/12", "ab/1", "b"):
            one.put(key, key.encode(), False)

        assert dict(other.under("a/")) == {"1": b"a/1", "12": b"a/12"}
        assert dict(other.under("c/")) == {}

    def test_a_counter_counts_for_all(self) -> None:
        one, other = self.make_views(2)
        assert [one.count("n"), other.count("n"), one.count("n")] == [1, 2, 3]

    def test_what_is_deleted_is_gone_and_nothing_else(self) -> None:
        one, other = self.make_views(2)
        for key in ("a/1", "a/b/2", "ab", "n"):
            one.put(key, b"x", False)

        one.delete("a/")
        one.delete("n")
        one.delete("absent")
        assert [other.wait(key, 0.0) for key in ("a/1", "a/b/2", "ab", "n")] == [None, None, b"x", None]
