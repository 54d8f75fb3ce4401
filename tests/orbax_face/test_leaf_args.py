"""The arguments of single leaves behave as Orbax's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

from penstock.orbax import type_handlers as ours
from penstock.orbax.leaf_args import PathAwaitingCreation

theirs = ocp.type_handlers
BOTH = pytest.mark.parametrize("library", [ours, theirs], ids=["penstock", "orbax"])


class Awaiting:
    """A path that is there once somebody waited for it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __truediv__(self, name: str) -> Awaiting:
        return Awaiting(self.path / name)

    async def await_creation(self) -> Path:
        self.path.mkdir(exist_ok=True)
        return self.path


@BOTH
@pytest.mark.parametrize(
    ("given", "shape"),
    [({}, None), ({"shape": (2, 3)}, (2, 3)), ({"global_shape": (4,)}, (4,))],
)
def test_shape_and_global_shape_are_one(library: Any, given: dict[str, Any], shape: object) -> None:
    args = library.ArrayRestoreArgs(**given)
    assert (args.shape, args.global_shape) == (shape, shape)


@BOTH
def test_shapes_that_differ_are_refused(library: Any) -> None:
    with pytest.raises(ValueError, match="match"):
        library.ArrayRestoreArgs(shape=(1,), global_shape=(2,))


@BOTH
def test_restore_args_of_arrays_are_restore_args(library: Any) -> None:
    args = library.SingleReplicaArrayRestoreArgs()
    assert isinstance(args, library.ArrayRestoreArgs)
    assert isinstance(args, library.RestoreArgs)
    assert args.restore_type is jax.Array
    assert args.strict is True


@BOTH
@pytest.mark.parametrize("lengths", [(0, 0), (1, 2), (2, 0), (0, 2)])
def test_inputs_of_different_lengths_are_refused(library: Any, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="length"):
        library.check_input_arguments(*[[None] * n for n in lengths])


@BOTH
def test_inputs_of_one_length_pass(library: Any) -> None:
    library.check_input_arguments([1, 2], [3, 4])
    library.check_input_arguments()
    library.check_input_arguments([])


def info(library: Any, directory: Any, **fields: Any) -> Any:
    return library.ParamInfo(name="a.b", parent_dir=directory, ts_context=library.get_ts_context(), **fields)


@BOTH
def test_the_path_of_a_leaf_is_in_its_directory(library: Any, tmp_path: Path) -> None:
    leaf = info(library, tmp_path)
    assert leaf.path == tmp_path / "a.b"
    assert info(library, tmp_path, path=tmp_path / "other").path == tmp_path / "other"


@BOTH
def test_a_copy_has_other_attributes(library: Any, tmp_path: Path) -> None:
    leaf = info(library, tmp_path)
    copy = leaf.replace(use_zarr3=True, parent_dir=tmp_path / "x")
    assert (copy.use_zarr3, copy.parent_dir, copy.name) == (True, tmp_path / "x", "a.b")
    assert (leaf.use_zarr3, leaf.parent_dir) == (False, tmp_path)


async def test_a_directory_that_is_being_created_is_waited_for(tmp_path: Path) -> None:
    leaf = info(ours, Awaiting(tmp_path / "tree"))
    for name in ("parent_dir", "path"):
        with pytest.raises(ValueError, match="await_path_creation"):
            getattr(leaf, name)

    await leaf.await_path_creation()
    assert leaf.parent_dir == tmp_path / "tree"
    assert leaf.path == tmp_path / "tree" / "a.b"
    await leaf.await_path_creation()  # nothing more to wait for


def test_who_has_await_creation_is_a_path_awaiting_creation(tmp_path: Path) -> None:
    assert isinstance(Awaiting(tmp_path), PathAwaitingCreation)
    assert not isinstance(tmp_path, PathAwaitingCreation)
