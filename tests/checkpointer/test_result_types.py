"""`as_type` names the type of a result. It is checked before the result is returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock
from penstock.errors import ResultTypeError, SpecError

TREE = {"a": np.arange(3), "b": 1}


class Tree(TypedDict):
    a: Any
    b: int


class Larger(Tree):
    c: int


class Shape(Protocol):
    a: int


@pytest.fixture
def path(tmp_path: Path) -> Path:
    penstock.sync.save(tmp_path / "x", TREE)
    return tmp_path / "x"


@pytest.mark.parametrize("as_type", [dict, dict[str, Any], Tree, object])
def test_a_result_of_that_type_is_returned(path: Path, as_type: type[Any]) -> None:
    assert penstock.sync.restore(path, as_type=as_type)["b"] == 1


@pytest.mark.parametrize("as_type", [list, list[int], Larger, jax.Array])
def test_a_result_of_another_type_is_an_error_that_names_both(path: Path, as_type: type[Any]) -> None:
    reports: list[penstock.RestoreReport] = []
    with pytest.raises(ResultTypeError, match=r"restored as a dict, and as_type asks for") as raised:
        penstock.sync.restore(path, as_type=as_type, on_report=reports.append)

    assert (raised.value.path, raised.value.as_type, raised.value.found) == (str(path), as_type, dict)
    assert reports == []


@pytest.mark.parametrize("as_type", ["dict", 3, Shape])
def test_what_nothing_can_be_checked_against_is_refused_before_anything_is_read(as_type: Any) -> None:
    with pytest.raises(SpecError, match="as_type must be a class"):
        penstock.sync.restore("/nothing/there", as_type=as_type)


def test_as_type_goes_with_a_target_of_structs(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "x", {"a": jnp.arange(3), "b": jnp.ones(())})
    shapes = jax.eval_shape(lambda: {"a": jnp.arange(3), "b": jnp.ones(())})

    assert penstock.sync.restore(tmp_path / "x", like=shapes, as_type=Tree)["b"] == 1


def test_three_dots_stand_for_no_target(path: Path) -> None:
    assert penstock.sync.restore(path, like=...)["b"] == 1


def test_the_result_of_restoring_a_step_has_its_type_checked(tmp_path: Path) -> None:
    with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
        future = manager.save(1, penstock.Composite(state=TREE))
        assert future is not None
        future.result()
        assert dict(manager.restore(as_type=penstock.Composite)).keys() == {"state"}
        assert manager.restore(item="state", as_type=Tree)["b"] == 1
        with pytest.raises(ResultTypeError, match="Composite"):
            manager.restore(as_type=Tree)
