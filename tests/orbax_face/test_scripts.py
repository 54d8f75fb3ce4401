"""Programs of the kind that use Orbax, in `scripts/`: the same results with either library, and with both."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax
import pytest

import penstock.orbax

SCRIPTS = sorted(path.stem for path in Path(__file__).with_name("scripts").glob("*.py"))


def assert_same(found: Any, expected: Any) -> None:
    """Compare structures, kinds of leaves, dtypes and values."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    assert structures[0] == structures[1]
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        kinds = (jax.Array, np.ndarray, bool, int, float, str)
        assert [isinstance(one, kind) for kind in kinds] == [isinstance(other, kind) for kind in kinds], path
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None), path
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), str(path))


pytestmark = [
    pytest.mark.timeout(240),  # eight programs
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.parametrize("name", SCRIPTS),
]


def test_a_script_resumes_with_penstock_what_it_did_with_orbax_and_back(tmp_path: Path, name: str) -> None:
    script = importlib.import_module(f"tests.orbax_face.scripts.{name}")
    with_orbax, with_penstock = (str(tmp_path / library) for library in ("orbax", "penstock"))
    assert_same(script.train(penstock.orbax, with_penstock), script.train(orbax, with_orbax))

    resumed = script.resume(penstock.orbax, with_orbax)
    assert_same(resumed, script.resume(orbax, with_penstock))


@pytest.mark.slow
def test_a_script_resumes_what_it_did_with_the_same_library(tmp_path: Path, name: str) -> None:
    script = importlib.import_module(f"tests.orbax_face.scripts.{name}")
    found: list[Any] = []
    for library in (penstock.orbax, orbax):
        folder = str(tmp_path / library.__name__)
        script.train(library, folder)
        found.append(script.resume(library, folder))

    assert_same(*found)
