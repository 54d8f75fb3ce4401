"""Key paths as they are printed select leaves, and so do shell patterns over dotted names."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.stages.planning.key_patterns import keys_in, near_leaves, pattern_fits, select_rows


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


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("parms.head", "did you mean 'params.head'?"),
        ("parms.blocks.*.kernel", "did you mean 'params.blocks.*.kernel'?"),
        ("parms.haed", "did you mean 'params'?"),
        ("PARAMS", "did you mean 'params'?"),
        ("params.haed.*", "did you mean 'params.head'?"),
        ("['params']['haed']", "did you mean 'params.head'?"),
        ("*.haed", "did you mean '*.head'?"),
        ("kernel", "did you mean '*.kernel'?"),
        ("params.xyz", "there are blocks, head below params"),
        ("xyz", "there are params, step"),
        ("step.x", "'step' is a leaf"),
        ("params", "did you mean 'params.*'?"),  # where only leaves are meant, as of dtypes
    ],
)
def test_what_matches_no_leaf_is_answered_by_what_is_near(pattern: str, said: str) -> None:
    keys = [("params", "blocks", "0", "kernel"), ("params", "head"), ("step",)]

    assert near_leaves(pattern, keys) == said


def test_near_leaves_of_an_empty_tree_says_that_it_has_none() -> None:
    assert near_leaves("params", []) == "it has no leaf"


def test_a_pattern_that_selects_no_leaf_is_an_error_that_names_near_ones() -> None:
    with pytest.raises(SpecError, match=r"no leaf of run/1 matches 'parms'; did you mean 'params'\?"):
        select_rows("run/1", [("params", "head")], ["params", "parms"])
