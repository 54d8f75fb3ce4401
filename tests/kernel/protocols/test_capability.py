from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import pytest

from penstock.kernel.protocols.capability import Capability


@runtime_checkable
class Sized(Capability, Protocol):
    @property
    def nbytes(self) -> int: ...
    def cut(self, most: int) -> object: ...


@runtime_checkable
class Named(Sized, Capability, Protocol):
    name: str


class Whole:
    nbytes = 1

    def cut(self, most: int) -> object:
        return most


class OnTheInstance:
    def __init__(self) -> None:
        self.nbytes, self.cut, self.name = 1, len, "n"


class Wrapper:
    """Hands every attribute through."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class OptsOut(Whole):
    cut = None  # type: ignore[assignment]  # as a class says that it lacks a method


class NoBytes(Whole):
    nbytes = None  # type: ignore[assignment]  # an attribute may be None


class Child(Sized):
    @property
    def nbytes(self) -> int:
        return 2

    def cut(self, most: int) -> object:
        return most


def examples() -> Iterator[tuple[object, bool, bool]]:
    yield Whole(), True, False
    yield OnTheInstance(), True, True
    yield Wrapper(Whole()), True, False
    yield Wrapper(OnTheInstance()), True, True
    yield OptsOut(), False, False
    yield NoBytes(), True, False
    yield Child(), True, False
    yield 5, False, False


@pytest.mark.parametrize(("value", "sized", "named"), list(examples()))
def test_an_object_offers_what_it_has_every_member_of(value: object, sized: bool, named: bool) -> None:
    for _ in range(2):  # the second time the class is known
        assert isinstance(value, Sized) is sized
        assert isinstance(value, Named) is named


def test_an_attribute_that_comes_later_counts() -> None:
    whole = Whole()
    assert not isinstance(whole, Named)

    whole.name = "n"  # type: ignore[attr-defined]  # the point of it

    assert isinstance(whole, Named)
    assert not isinstance(Whole(), Named)


def test_a_class_that_implements_a_protocol_is_asked_for_as_any_class() -> None:
    assert isinstance(Child(), Child)
    assert not isinstance(Whole(), Child)
