"""Leaves without array bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.handlers.leaves.round_trips import INFO, Saved, difference, plan, restore, save

from penstock.errors import InvalidLeafError
from penstock.handlers import ArrayHandler, EmptyHandler, StringHandler
from penstock.kernel import LeafSpec

STRING, EMPTY = StringHandler(), EmptyHandler()


class Nothing(NamedTuple):
    pass


class Named(str):
    __slots__ = ()


@pytest.mark.parametrize("text", ["", "adam", "naïve ☃", "\x00\n\U0001f600"])
def test_a_string_comes_back(text: str) -> None:
    spec, plans = plan(STRING, text)
    assert (spec.typestr, spec.text, spec.shape, spec.nbytes, plans) == ("string", text, None, 0, [])
    for like in ((), ("other",), (str,)):
        back = restore(STRING, save(STRING, text), *like)
        assert (type(back), back) == (str, text)


def test_a_numpy_string_comes_back_as_one_when_asked_for() -> None:
    saved = save(STRING, np.str_("x"))
    assert type(restore(STRING, saved)) is str
    assert type(restore(STRING, saved, np.str_("y"))) is np.str_


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Named("x"), "Named would come back as str"),
        ("\ud800", "no valid Unicode text"),
        (b"x", "would come back as str"),
    ],
)
def test_what_is_no_string_is_refused(value: object, words: str) -> None:
    with pytest.raises(InvalidLeafError, match=rf"^\['opt'\]\.mu: .*{words}"):
        STRING.describe([value], [INFO], {})


def test_an_array_is_no_string() -> None:
    found = difference(STRING, save(ArrayHandler(), jnp.zeros((2,))), "x")
    assert (found.kind, found.in_like, found.on_disk) == ("type", "string", "jax.Array float32[2]")


@pytest.mark.parametrize(
    ("value", "marker", "default"),
    [
        (None, "None", None),
        ({}, "Dict", {}),
        (OrderedDict(), "Dict", {}),
        ([], "List", []),
        ((), "Tuple", ()),
        (Nothing(), "None", None),
        (optax.EmptyState(), "None", None),
    ],
    ids=repr,
)
def test_an_empty_value_is_a_marker(value: Any, marker: str, default: object) -> None:
    spec, plans = plan(EMPTY, value)
    assert (spec.typestr, spec.is_empty_marker, plans) == (marker, True, [])
    saved = save(EMPTY, value)
    back = restore(EMPTY, saved)
    assert (type(back), back) == (type(default), default)
    for like in (value, type(value)):
        back = restore(EMPTY, saved, like)
        assert (type(back), back) == (type(value), value)


def test_a_mutable_target_is_not_handed_out() -> None:
    like: dict[str, int] = {}
    assert restore(EMPTY, save(EMPTY, {}), like) is not like


@pytest.mark.parametrize(
    ("stored", "like", "fits"),
    [
        ("NamedTuple", Nothing(), True),
        ("NamedTuple", None, True),
        ("None", (), True),
        ("Tuple", [], True),
        ("List", (), True),
        ("None", {}, False),
        ("Dict", None, False),
        ("Dict", [], False),
    ],
)
def test_markers_fit_as_structures_do(stored: str, like: object, fits: bool) -> None:
    saved = Saved(LeafSpec(stored), {})
    if fits:
        assert type(restore(EMPTY, saved, like)) is type(like)
    else:
        assert difference(EMPTY, saved, like).on_disk == stored


@pytest.mark.parametrize(("like", "name"), [(None, "None"), ({}, "dict"), (optax.EmptyState(), "EmptyState")])
def test_an_array_is_never_dropped_for_an_empty_target(like: object, name: str) -> None:
    found = difference(EMPTY, save(ArrayHandler(), jnp.zeros((2,))), like)
    assert found.kind == "type"
    assert found.in_like.endswith(name)


@pytest.mark.parametrize("value", [{"a": 1}, [1], (1,), 3])
def test_what_has_content_is_no_empty_leaf(value: object) -> None:
    with pytest.raises(InvalidLeafError, match=r"^\['opt'\]\.mu: a \w+ with content is no leaf"):
        EMPTY.describe([value], [INFO], {})
