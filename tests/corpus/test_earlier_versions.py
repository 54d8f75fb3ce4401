"""What Orbax 0.2.7 to 0.12.0 wrote with each of its options then, restored in every way."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.corpus.corpora import EARLIER, unpacked_earlier

import penstock

CASES = [(version, case) for version, cases in EARLIER.items() for case in cases]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_earlier(tmp_path_factory) / "earlier"


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    with penstock.sync.Checkpointer() as checkpointer:
        yield checkpointer


def decoded(node: Any) -> Any:
    """What was saved, as nested dicts and lists of NumPy arrays, numbers, strings and None."""
    if isinstance(node, list):
        return [decoded(item) for item in node]
    if isinstance(node, dict) and "dict" in node:
        return {name: decoded(item) for name, item in node["dict"].items()}
    if isinstance(node, dict):
        name, shape, data = node["array"]
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        return np.frombuffer(b64decode(data), dtype).reshape(shape)

    return node


def is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def assert_is(found: Any, saved: Any, path: str = "") -> None:
    """The same containers and values; numbers may be arrays of no axes, and the other way round."""
    if is_empty(saved):
        assert is_empty(found), path  # an empty tuple was None for long
    elif isinstance(saved, dict):
        assert sorted(found) == sorted(saved), path
        for name, value in saved.items():
            assert_is(found[name], value, f"{path}.{name}")
    elif isinstance(saved, list):
        assert len(found) == len(saved), path
        for at, value in enumerate(saved):
            assert_is(found[at], value, f"{path}.{at}")
    elif isinstance(saved, np.ndarray):
        if isinstance(found, jax.Array) and jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
            found = jax.random.key_data(found)
        array = np.asarray(found, saved.dtype if isinstance(found, int | float) else None)
        assert (array.dtype, array.shape, array.tobytes()) == (saved.dtype, saved.shape, saved.tobytes()), (
            path
        )
    else:
        assert found == saved, path


def target(saved: Any) -> Any:
    """The same, with an empty list, which may have been a tuple, as a tuple."""
    if isinstance(saved, dict) and saved:
        return {name: target(value) for name, value in saved.items()}
    if isinstance(saved, list) and saved:
        return [target(value) for value in saved]

    return () if isinstance(saved, list) else saved


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("version", "case"), CASES)
def test_a_checkpoint_of_an_earlier_version_comes_back(
    version: str, case: str, earlier: Path, ours: Any
) -> None:
    path, saved = earlier / version / case, decoded(EARLIER[version][case])

    assert_is(ours.restore(path), saved)
    found = ours.metadata(path)
    assert len(found.leaves) == len(jax.tree.leaves(saved, is_leaf=is_empty))
    assert found.stored_nbytes > 0 or not found.nbytes


@pytest.mark.parametrize("version", [version for version in EARLIER if "array" in EARLIER[version]])
def test_an_array_alone_is_of_the_type_that_was_saved(version: str, earlier: Path, ours: Any) -> None:
    found = ours.restore(earlier / version / "array")["checkpoint"]
    assert isinstance(found, np.ndarray if version == "0.2.7" else jax.Array)  # which recorded no types


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("version", "case"), CASES)
def test_a_checkpoint_of_an_earlier_version_comes_back_with_a_target(
    version: str, case: str, earlier: Path, ours: Any
) -> None:
    path, saved = earlier / version / case, decoded(EARLIER[version][case])

    assert_is(ours.restore(path, like=target(saved)), saved)
