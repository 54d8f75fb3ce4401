from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tests.programs.facts import describe, differences, files_of


class Pair(NamedTuple):
    first: int
    second: int


def on_two(*axes: str) -> Any:
    make_spec: Any = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return jax.device_put(np.arange(4.0), NamedSharding(mesh, make_spec(*axes)))


def struct(dtype: Any) -> Any:
    return jax.eval_shape(lambda: jnp.zeros(3, dtype))


class MissingError(FileNotFoundError): ...


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(np.float32(1), np.float64(1), id="dtypes"),
        pytest.param(np.arange(3), np.array([0, 1, 3]), id="bytes"),
        pytest.param(np.array(0.0), np.array(-0.0), id="signs of zeros"),
        pytest.param(np.zeros((2, 1)), np.zeros((1, 2)), id="shapes"),
        pytest.param(np.zeros(2), jax.device_put(np.zeros(2)), id="kinds of arrays"),
        pytest.param(on_two(), on_two("x"), id="shardings"),
        pytest.param(jax.random.key(0), jax.random.key(1), id="keys"),
        pytest.param(jax.random.key(0), jax.random.key(0, impl="rbg"), id="implementations of keys"),
        pytest.param(struct(jnp.int8), struct(jnp.int4), id="structs"),
        pytest.param((1, 2), [1, 2], id="sequences"),
        pytest.param(Pair(1, 2), (1, 2), id="named tuples"),
        pytest.param({"a": 1}, OrderedDict(a=1), id="mappings"),
        pytest.param({1: 2}, {"1": 2}, id="names"),
        pytest.param({"a": None}, {}, id="what is empty"),
        pytest.param(1, 1.0, id="numbers"),
        pytest.param(1, True, id="booleans"),
        pytest.param(1, "1", id="texts"),
        pytest.param(KeyError("x"), ValueError("x"), id="kinds of errors"),
    ],
)
def test_what_differs_is_seen_at_any_depth(one: Any, other: Any) -> None:
    assert describe(one) != describe(other)
    assert describe([{"a": one}]) != describe([{"a": other}])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32(np.nan), np.float32(np.nan)),
        (float("nan"), float("nan")),
        (MissingError("here"), FileNotFoundError("there")),
        (Path("/a/c"), Path("/b/c")),
    ],
)
def test_what_a_program_cannot_tell_apart_is_the_same(one: Any, other: Any) -> None:
    assert describe(one) == describe(other)


def test_files_are_listed_but_for_those_that_differ_by_design(tmp_path: Path) -> None:
    seen = ["7", "7/_METADATA", "7/state", "7/state/manifest.ocdbt"]
    for name in (*seen, "7/state/d/1f", "7/state/w/0.0", "7/_PENSTOCK_INTEGRITY"):
        path = tmp_path / name
        if "." in path.name or name.count("/") == 3 or path.name.startswith("_"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    assert files_of(tmp_path) == sorted([*seen, "7/state/w"])


def test_a_difference_says_where() -> None:
    theirs, ours = ({"tree": describe([np.int8(1), last]), "files": ["x"]} for last in (1, 2))

    assert differences(theirs, ours, " here") == {"tree here": '.items[1]: "1" != "2"'}
    assert differences(theirs, {**theirs, "files": ["y"]}) == {"files": " without ['x'], with ['y']"}


def test_a_run_that_failed_is_a_difference_with_either_library() -> None:
    assert differences({}, {"failed": "KeyError: 'a'"}) == {"failed": "KeyError: 'a'"}
    assert differences({"failed": "no"}, {"failed": "no"}) == {"failed with Orbax": "no"}
