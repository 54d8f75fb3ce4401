"""The same script on both libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as orbax_v1
import pytest

import penstock.orbax.v1 as penstock_v1

LIBRARIES = [pytest.param(orbax_v1, id="orbax"), pytest.param(penstock_v1, id="penstock")]


@pytest.fixture(params=LIBRARIES)
def ocp(request: pytest.FixtureRequest) -> Any:
    """Each library in turn."""
    library: ModuleType = request.param
    return library


@pytest.fixture(
    params=[
        pytest.param((orbax_v1, penstock_v1), id="orbax-to-penstock"),
        pytest.param((penstock_v1, orbax_v1), id="penstock-to-orbax"),
        pytest.param((penstock_v1, penstock_v1), id="penstock-to-penstock"),
    ]
)
def writer_and_reader(request: pytest.FixtureRequest) -> Any:
    """Who saves, and who loads."""
    return request.param


@pytest.fixture
def tree() -> Any:
    """A tree with a leaf of every kind."""
    return {
        "array": jnp.arange(8, dtype=jnp.float32),
        "large": jnp.ones((200, 300), jnp.bfloat16),
        "nested": {"numpy": np.arange(6).reshape(2, 3), "int": 3, "float": 2.5, "text": "words"},
        "list": [1, np.float32(2) * np.ones(2, np.float32)],
        "empty": {},
        "none": None,
    }


@pytest.fixture
def same() -> Callable[[Any, Any], None]:
    """Compares trees: structure, types, dtypes, values."""

    def compare(found: Any, expected: Any) -> None:
        structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
        assert structures[0] == structures[1]
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
        ):
            kinds = (jax.Array, np.ndarray, int, float, str)
            assert [isinstance(one, kind) for kind in kinds] == [isinstance(other, kind) for kind in kinds], (
                path
            )
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), str(path))
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None), path

    return compare


@pytest.fixture
def files() -> Callable[[Path], set[str]]:
    """Lists the files and directories of a checkpoint, apart from data files, whose names mean nothing."""

    def listed(path: Path) -> set[str]:
        found: set[str] = set()
        for folder, _, names in os.walk(path):
            inner = os.path.relpath(folder, path)
            if os.path.basename(folder) == "d" or "ocdbt.process_" in inner:
                continue

            found |= {os.path.normpath(os.path.join(inner, name)) for name in names}

        return found - {name for name in found if name.endswith("_PENSTOCK_INTEGRITY")}

    return listed
