"""The same script on both libraries: what a checkpoint says of its leaves, and restores without a target."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import orbax.checkpoint.experimental.v1 as orbax_v1
import pytest
from safetensors.numpy import save_file

import penstock
import penstock.orbax
import penstock.orbax.v1 as penstock_v1

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
both = pytest.mark.parametrize("ocp", LIBRARIES, ids=["penstock", "orbax"])
NUMBERS = ("bool", "int8", "int4", "uint16", "float32", "bfloat16", "float8_e4m3fn", "complex64")
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def _dtype(name: str) -> Any:
    return np.dtype(getattr(jnp, name))


@both
def test_strings_come_back_without_a_target(tmp_path: Path, ocp: Any) -> None:
    tree = {"name": "run", "config": [{"kind": "small"}, 3]}
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(0, args=ocp.args.PyTreeSave(tree))
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        assert manager.restore(0, args=ocp.args.StandardRestore()) == tree
    with ocp.StandardCheckpointer() as checkpointer:
        assert checkpointer.restore(tmp_path / "steps" / "0" / "default") == tree


_RESTORE: Final = """
import sys
from importlib import import_module

with import_module(sys.argv[1]).CheckpointManager(sys.argv[2]) as manager:
    found = manager.restore(0)
print(sorted(found), found["array"].tolist(), found["key"].dtype, found["seeds"][0])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "ocp",
    [penstock.orbax, pytest.param(orbax.checkpoint, marks=pytest.mark.slow)],
    ids=["penstock", "orbax"],
)
def test_items_of_every_kind_come_back_in_a_process_that_names_none(tmp_path: Path, ocp: Any) -> None:
    args = ocp.args
    items = {
        "array": args.ArraySave(np.arange(3)),
        "key": args.JaxRandomKeySave(jax.random.key(1)),
        "seeds": args.NumpyRandomKeySave(np.random.RandomState(1).get_state()),
        "words": args.JsonSave({"a": 1}),
    }
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=args.Composite(**items))

    command = [sys.executable, "-c", _RESTORE, ocp.__name__, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert told == "['array', 'key', 'seeds', 'words'] [0, 1, 2] key<fry> MT19937\n"


@both
@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_number_of_any_dtype_has_a_type_of_python(ocp: Any, dtype: str) -> None:
    leaf = ocp.metadata.value.ScalarMetadata(name="a", directory=None, dtype=_dtype(dtype))

    found = ocp.checkpoint_utils.construct_restore_args({"a": leaf})["a"]

    kind = bool if dtype == "bool" else complex if dtype == "complex64" else int if "int" in dtype else float
    assert (found.restore_type, found.dtype) == (kind, _dtype(dtype))


@both
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float16"])
def test_a_number_that_was_cast_comes_back_without_a_target(tmp_path: Path, ocp: Any, dtype: str) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        as_asked = {"a": ocp.SaveArgs(dtype=_dtype(dtype))}
        checkpointer.save(tmp_path / "one", {"a": 3}, save_args=as_asked)
    with ocp.StandardCheckpointer() as reader:
        found = reader.restore(tmp_path / "one")["a"]

    assert (type(found), found) == (int if dtype == "int8" else float, 3)


@both
@pytest.mark.parametrize("wrong", ["typo", "missing", "more", "one for all"])
def test_save_args_must_fit_the_tree(tmp_path: Path, ocp: Any, wrong: str) -> None:
    tree, one = {"a": np.arange(3), "b": {"c": np.arange(2)}}, ocp.SaveArgs()
    given = {
        "typo": {"a": one, "b": {"d": one}},
        "missing": {"a": one},
        "more": {"a": one, "b": {"c": one}, "z": one},
        "one for all": one,
    }[wrong]
    with ocp.PyTreeCheckpointer() as checkpointer, pytest.raises(ValueError, match="structure"):
        checkpointer.save(tmp_path / "one", tree, save_args=given)

    with ocp.StandardCheckpointer() as standard, pytest.raises((ValueError, AttributeError)):
        standard.save(tmp_path / "other", tree, save_args=given)


@both
def test_save_args_may_be_none_for_a_leaf_and_absent_for_what_is_empty(tmp_path: Path, ocp: Any) -> None:
    tree = {"a": np.arange(3), "b": {}, "c": None, "d": np.arange(2)}
    given = {"a": ocp.SaveArgs(dtype=np.dtype(np.int8)), "b": {}, "c": ocp.SaveArgs(), "d": None}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", tree, save_args=given)
        found = checkpointer.restore(tmp_path / "one")

    assert [str(found[name].dtype) for name in "ad"] == ["int8", "int64"]


@pytest.mark.parametrize("zarr3", [False, True], ids=["zarr2", "zarr3"])
async def test_the_metadata_of_the_format_is_as_orbax_gives_it(tmp_path: Path, zarr3: bool) -> None:
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "n": np.arange(4, dtype=np.int16)}
    for ocp in LIBRARIES:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=zarr3)) as checkpointer:
            checkpointer.save(tmp_path / ocp.__name__, tree)

        told: list[list[Any]] = []
        for reader, newer in zip(LIBRARIES, (penstock_v1, orbax_v1), strict=True):
            with reader.PyTreeCheckpointer() as checkpointer:
                found = checkpointer.metadata(tmp_path / ocp.__name__).item_metadata.tree
            formats = [found[name].storage.zarr_metadata for name in "an"]
            loaded: Any = newer.metadata(tmp_path / ocp.__name__, checkpointable_name=None).metadata
            formats += [loaded[name].storage_metadata.zarr_metadata for name in "an"]
            told.append([repr(one) for one in formats])

        assert told[0] == told[1]
        assert "zarr_format=3" in told[0][0] if zarr3 else "order='C'" in told[0][0]

    async with penstock.Checkpointer() as own:
        known = (await own.metadata(tmp_path / "penstock.orbax")).tree["a"].zarr_metadata
    assert known["zarr_format"] == (3 if zarr3 else 2)
    assert known["shape"] == [2, 3]


async def test_what_is_no_array_has_no_metadata_of_the_format(tmp_path: Path) -> None:
    async with penstock.Checkpointer() as own:
        await (await own.save(tmp_path / "one", {"s": "x", "e": {}, "k": 3}))
        found = (await own.metadata(tmp_path / "one")).tree

    assert found["s"].zarr_metadata is None
    assert found["k"].zarr_metadata["shape"] == []


@pytest.mark.parametrize("v1", [penstock_v1, orbax_v1], ids=["penstock", "orbax"])
def test_structs_without_a_sharding_come_from_safetensors_to_all_devices(tmp_path: Path, v1: Any) -> None:
    values = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_file(values, tmp_path / "model.safetensors")
    context = v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS)
    struct: Any = jax.ShapeDtypeStruct
    with context:
        found = v1.load(tmp_path / "model.safetensors", {"w": struct((2, 3), jnp.float32)})["w"]

    assert found.sharding.is_fully_replicated
    assert found.devices() == set(jax.devices())
    np.testing.assert_array_equal(found, values["w"])


@both
def test_the_structure_of_no_directory_is_not_found(tmp_path: Path, ocp: Any) -> None:
    with pytest.raises(FileNotFoundError):
        ocp.utils.pytree_structure(tmp_path / "absent")


@both
@pytest.mark.parametrize("damaged", [False, True], ids=["lost", "damaged"])
def test_a_step_without_its_description_is_a_checkpoint(tmp_path: Path, ocp: Any, damaged: bool) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
    file = tmp_path / "0" / "_CHECKPOINT_METADATA"
    file.unlink()
    if damaged:
        (tmp_path / "0" / "default" / "_METADATA").write_text("{")

    v1: Any = penstock_v1 if ocp is penstock.orbax else orbax_v1
    assert v1.is_orbax_checkpoint(tmp_path / "0")
