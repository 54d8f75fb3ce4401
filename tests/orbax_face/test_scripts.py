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


@pytest.mark.timeout(240)  # eight programs
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_with_penstock_what_it_does_with_orbax(tmp_path: Path, name: str) -> None:
    script = importlib.import_module(f"tests.orbax_face.scripts.{name}")
    trained = script.train(orbax, str(tmp_path / "orbax"))
    assert_same(script.train(penstock.orbax, str(tmp_path / "penstock")), trained)
    assert_same(script.train(penstock.orbax, str(tmp_path / "for-orbax")), trained)
    script.train(orbax, str(tmp_path / "for-penstock"))

    resumed = script.resume(orbax, str(tmp_path / "orbax"))
    assert_same(script.resume(penstock.orbax, str(tmp_path / "penstock")), resumed)
    assert_same(script.resume(penstock.orbax, str(tmp_path / "for-penstock")), resumed)
    assert_same(script.resume(orbax, str(tmp_path / "for-orbax")), resumed)
