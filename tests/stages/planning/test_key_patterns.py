"""Key paths as they are printed select leaves, and so do shell patterns over dotted names."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.planning.key_patterns import keys_in, pattern_fits


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("['model']['head']", ("model", "head")),
        ("['opt'][0].mu", ("opt", "0", "mu")),
        ('["it\'s"]', ("it's",)),
        ("['a.b']", ("a.b",)),
        ("['\\x1b']", ("\x1b",)),
        ("[<flat index 2>]", ("2",)),
        ("[12]", ("12",)),
        (".params['w']", ("params", "w")),
        ("params.*", None),
        ("[ab]*", None),
        ("['a'", None),
        ("['a']*", None),
        ("['\\x']", None),
        ("", None),
    ],
)
def test_key_paths_are_read_as_they_are_printed(text: str, keys: tuple[str, ...] | None) -> None:
    assert keys_in(text) == keys


@given(st.lists(st.one_of(st.text(), st.integers(0, 99)), min_size=1, max_size=4))
def test_whatever_jax_prints_is_read_back(keys: list[Any]) -> None:
    path = [
        jax.tree_util.DictKey(key) if isinstance(key, str) else jax.tree_util.SequenceKey(key) for key in keys
    ]

    assert keys_in(jax.tree_util.keystr(tuple(path))) == tuple(map(str, keys))


def test_a_pattern_that_names_a_node_selects_what_is_below() -> None:
    leaf = ("model", "head", "w")

    for pattern in (
        "['model']['head']",
        "['model']",
        "['model']['head']['w']",
        "model.head",
        "model.*",
        "*.w",
    ):
        assert pattern_fits(pattern, "model.head.w", leaf)
    for pattern in ("['model']['hea']", "['head']", "head", "model.hea", "['model']['head']['w']['x']"):
        assert not pattern_fits(pattern, "model.head.w", leaf)


def test_a_key_with_a_dot_is_not_two_keys() -> None:
    assert pattern_fits("['a.b']", "a.b", ("a.b",))
    assert not pattern_fits("['a']['b']", "a.b", ("a.b",))
