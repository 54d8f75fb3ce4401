"""Leaves that come from elsewhere: the same request to both libraries, of what either has saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as _orbax
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock.orbax as _penstock

ours: Any = _penstock
theirs: Any = _orbax  # it has no types
BOTH = [pytest.param(ours, id="penstock"), pytest.param(theirs, id="orbax")]
_spec: Any = PartitionSpec
SEEN = ("name", "skip_deserialize", "is_ocdbt_checkpoint", "use_zarr3")


def saved(library: Any, path: Path, tree: Any, **options: Any) -> Path:
    with library.Checkpointer(library.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=library.args.PyTreeSave(tree))
    return path


def restored(library: Any, path: Path, **request: Any) -> Any:
    with library.Checkpointer(library.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=library.args.PyTreeRestore(**request))


def is_info(node: Any) -> bool:
    return hasattr(node, "ts_context")


def is_entry(node: Any) -> bool:
    return hasattr(node, "value_type")


@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["ocdbt", "files"])
@pytest.mark.parametrize("writer", BOTH)
def test_a_legacy_function_sees_what_is_stored_and_how(tmp_path: Path, writer: Any, use_ocdbt: bool) -> None:
    tree = {"a": jnp.arange(4.0), "b": [np.arange(3), 5], "s": "text", "e": {}}
    path = saved(writer, tmp_path / "one", tree, use_ocdbt=use_ocdbt, use_zarr3=True)
    seen: dict[str, Any] = {}

    def look(ocp: Any) -> Any:
        def function(item: Any, structure: Any, infos: Any) -> Any:
            entries = jax.tree.map(lambda one: vars(one) | {"write_shape": None}, structure, is_leaf=is_entry)
            about = jax.tree.map(lambda one: {key: getattr(one, key) for key in SEEN}, infos, is_leaf=is_info)
            contexts = [one.ts_context is None for one in jax.tree.leaves(infos, is_leaf=is_info)]
            places = {str(one.parent_dir) for one in jax.tree.leaves(infos, is_leaf=is_info)}
            seen[ocp.__name__] = item, entries, about, contexts, places
            return {"z": structure["a"], "n": structure["b"][1]}, {"z": infos["a"], "n": infos["b"][1]}

        args = {"z": ocp.RestoreArgs(restore_type=np.ndarray), "n": ocp.RestoreArgs()}
        item = {"z": 0, "n": 0}
        return restored(ocp, path, item=item, restore_args=args, legacy_transform_fn=function)

    mine, other = look(ours), look(theirs)

    assert seen[ours.__name__] == seen[theirs.__name__]
    for found in (mine, other):
        np.testing.assert_array_equal(found["z"], np.arange(4.0))
        assert found["n"] == 5


@pytest.mark.parametrize("ocp", BOTH)
def test_a_legacy_function_takes_leaves_from_another_checkpoint(tmp_path: Path, ocp: Any) -> None:
    path = saved(ours, tmp_path / "one", {"a": np.arange(4), "b": np.arange(2)})
    other = saved(ours, tmp_path / "two", {"a": np.arange(4) * 10, "c": np.arange(2)})

    def function(item: Any, structure: Any, infos: Any) -> Any:
        elsewhere = infos["a"].replace(parent_dir=type(infos["a"].parent_dir)(other))
        elsewhere = elsewhere.replace(path=elsewhere.parent_dir / "a")
        return {"x": structure["a"], "y": structure["a"]}, {"x": infos["a"], "y": elsewhere}

    args = {"x": ocp.RestoreArgs(), "y": ocp.RestoreArgs()}
    found = restored(ocp, path, item={"x": 0, "y": 0}, restore_args=args, legacy_transform_fn=function)

    np.testing.assert_array_equal(found["x"], np.arange(4))
    np.testing.assert_array_equal(found["y"], np.arange(4) * 10)


@pytest.mark.parametrize("ocp", BOTH)
def test_a_legacy_function_says_of_which_type_a_leaf_is_restored(tmp_path: Path, ocp: Any) -> None:
    """As T5X does for what it places itself."""
    path = saved(ours, tmp_path / "one", {"a": jnp.arange(4), "b": jnp.arange(2), "c": jnp.arange(3)})

    def function(item: Any, structure: Any, infos: Any) -> Any:
        as_numpy = dataclasses.replace(structure["b"], value_type="np.ndarray")
        return {"x": structure["a"], "y": as_numpy, "z": as_numpy}, {
            "x": infos["a"],
            "y": infos["b"],
            "z": infos["c"],
        }

    on_device = ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[1]))
    args = {"x": on_device, "y": ocp.RestoreArgs(dtype=np.float32), "z": on_device}
    found = restored(
        ocp, path, item={"x": 0, "y": 0, "z": 0}, restore_args=args, legacy_transform_fn=function
    )

    assert {name: type(value) is np.ndarray for name, value in found.items()} == {
        "x": False,
        "y": True,
        "z": False,  # what is asked for comes first
    }
    assert found["y"].dtype == np.float32


@pytest.mark.parametrize("ocp", BOTH)
def test_results_of_one_leaf_have_the_arguments_of_each(tmp_path: Path, ocp: Any) -> None:
    path = saved(ours, tmp_path / "one", {"a": jnp.arange(4), "b": jnp.arange(2)})

    def function(item: Any, structure: Any, infos: Any) -> Any:
        return dict.fromkeys("xyz", structure["a"]), dict.fromkeys("xyz", infos["a"])

    devices = jax.devices()
    x, z = (
        ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(devices[at]), dtype=dtype)
        for at, dtype in ((1, np.float32), (0, np.int8))
    )
    args = {"x": x, "y": ocp.RestoreArgs(restore_type=np.ndarray), "z": z}
    found = restored(ocp, path, item=dict.fromkeys("xyz", 0), restore_args=args, legacy_transform_fn=function)

    assert type(found["y"]) is np.ndarray
    assert (found["x"].dtype, found["x"].devices()) == (np.float32, {devices[1]})
    assert (found["z"].dtype, found["z"].devices()) == (np.int8, {devices[0]})
    for value in found.values():
        np.testing.assert_array_equal(value, np.arange(4))


@pytest.mark.parametrize("ocp", BOTH)
def test_the_structure_of_a_stored_tree_is_read_as_a_legacy_function_gets_it(
    tmp_path: Path, ocp: Any
) -> None:
    """T5X chooses by it what a restore reads."""
    tree = {"a": np.arange(4), "b": [np.arange(2), 5], "e": {}}
    path = saved(ours, tmp_path / "one", tree, use_ocdbt=True, use_zarr3=True)
    seen: list[Any] = []

    def look(item: Any, structure: Any, infos: Any) -> Any:
        seen.append(structure)
        return structure, infos

    restored(ocp, path, item=tree, legacy_transform_fn=look)
    structure, use_zarr3 = ocp.PyTreeCheckpointHandler()._get_internal_metadata(epath.Path(path))

    assert structure == seen[0]
    assert structure["b"][1].value_type == "scalar"
    assert use_zarr3


def test_a_leaf_that_the_other_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    path = saved(ours, tmp_path / "one", {"a": np.arange(4)})
    other = saved(ours, tmp_path / "two", {"c": np.arange(2)})

    def function(item: Any, structure: Any, infos: Any) -> Any:
        return structure, {"a": infos["a"].replace(parent_dir=other)}

    with pytest.raises(ValueError, match=r"two does not have: \['a'\]"):
        restored(ours, path, item={"a": 0}, legacy_transform_fn=function)


@pytest.mark.parametrize("renamed", ["a", "b"])
def test_the_first_transform_that_needs_a_leaf_says_how_it_is_restored(tmp_path: Path, renamed: str) -> None:
    path = saved(ours, tmp_path / "one", {"x": np.arange(4, dtype=np.int32)})
    computed = "b" if renamed == "a" else "a"
    dtypes: list[Any] = []
    for ocp in (ours, theirs):

        def total(key: str, tree: Any, args: Any) -> Any:
            return tree["x"] + args.dtype(1)

        transforms = {
            renamed: ocp.RestoreTransform(original_key="x"),
            computed: ocp.RestoreTransform(
                multi_value_fn=total,
                multi_value_fn_input_args={"x": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float16)},
            ),
        }
        args = {
            renamed: ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.int64),
            computed: ocp.RestoreArgs(dtype=np.int8),
        }
        found = restored(ocp, path, item={"a": 0, "b": 0}, restore_args=args, transforms=transforms)
        dtypes.append((found["a"].dtype, found["b"].dtype))

    assert dtypes[0] == dtypes[1]
    assert dtypes[0][renamed != "a"] == (np.int64 if renamed == "a" else np.float16)


MESH = Mesh(np.array(jax.devices()[:4]), ("x",))
SPLIT, WHOLE = NamedSharding(MESH, _spec("x")), NamedSharding(MESH, _spec())


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"mesh": MESH, "mesh_axes": _spec("x")}, SPLIT),
        ({"mesh": MESH, "mesh_axes": _spec("x"), "sharding": WHOLE}, SPLIT),
        ({"mesh": MESH, "sharding": WHOLE}, WHOLE),
        ({"mesh_axes": _spec("x"), "sharding": WHOLE}, WHOLE),
    ],
    ids=["mesh", "both", "mesh alone", "axes alone"],
)
@pytest.mark.parametrize("ocp", BOTH)
def test_a_mesh_with_axes_counts_before_a_sharding(tmp_path: Path, ocp: Any, asked: Any, wanted: Any) -> None:
    path = saved(ours, tmp_path / "one", {"a": jnp.arange(8)})

    found = restored(ocp, path, restore_args={"a": ocp.ArrayRestoreArgs(**asked)})

    assert found["a"].sharding.is_equivalent_to(wanted, 1)


@pytest.mark.parametrize("ocp", BOTH)
def test_a_handler_that_is_called_directly_follows_the_rule_of_transforms(tmp_path: Path, ocp: Any) -> None:
    path = saved(ours, tmp_path / "one", {"a": jnp.arange(8)})
    info = ocp.type_handlers.ParamInfo(
        name="a",
        parent_dir=theirs.path.step.epath.Path(path),
        is_ocdbt_checkpoint=True,
        ts_context=ocp.type_handlers.get_ts_context(use_ocdbt=True),
    )
    handler = ocp.type_handlers.ArrayHandler()
    args = ocp.ArrayRestoreArgs(mesh=MESH, mesh_axes=_spec("x"), sharding=WHOLE)

    async def read() -> Any:
        return await handler.deserialize([info], [args])

    assert anyio.run(read)[0].sharding.is_equivalent_to(SPLIT, 1)
