"""Which values are known to lie in which checkpoint."""

from __future__ import annotations

import weakref
from typing import Any, final

from penstock.kernel.memory import BoundedCache
from penstock.stages.reuse.value_cache import KnownValues


@final
class Value:
    """Something that can be referred to weakly."""


def test_what_was_moved_is_known_under_its_new_path_while_it_keeps_its_identity() -> None:
    value, known = Value(), KnownValues(BoundedCache(4))
    references: dict[str, Any] = {"w": weakref.ref(value)}
    known.remember("/run/1.tmp/default", "identity", {"/run/1.tmp/default": references})
    known.moved("/run/1.tmp/default", "/run/1/default", "identity")

    assert known.find("/run/1.tmp/default", "identity") == {}
    assert known.find("/run/1/default", "identity") == {"/run/1/default": references}
    assert known.find("/run/1/default", "that of another one, which replaced it") == {}


def test_of_what_nobody_saved_nothing_is_known_when_it_is_moved() -> None:
    known = KnownValues(BoundedCache(4))
    known.moved("/run/1.tmp", "/run/1", "identity")
    assert known.find("/run/1", "identity") == {}
