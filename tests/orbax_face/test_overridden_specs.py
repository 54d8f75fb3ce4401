"""Programs that derive from a type handler and change where, or how, TensorStore stores an array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.orbax_face.leaf_round_trips import infos, on

import penstock.orbax as ocp
from penstock.orbax import type_handlers
from penstock.orbax.type_handlers import Store

TREE: dict[str, Any] = {"w": np.arange(96, dtype=np.float32).reshape(8, 12), "b": np.arange(5), "step": 3}


def elsewhere(spec: dict[str, Any], vault: Path) -> dict[str, Any]:
    """Store what would be below the directory of a tree in another place."""
    inner = spec.get("base", spec)
    inner["kvstore"] = {"driver": "file", "path": f"{vault}/{inner['kvstore']['path'].rpartition('/')[2]}/"}
    return spec


def handlers_of(vault: Path) -> tuple[Any, Any]:
    class InVault:
        def _get_json_tspec_write(self, info: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            spec: dict[str, Any] = super()._get_json_tspec_write(info, *args, **kwargs)  # type: ignore[misc]
            return elsewhere(spec, vault)

        def _get_json_tspec_read(self, info: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            spec: dict[str, Any] = super()._get_json_tspec_read(info, *args, **kwargs)  # type: ignore[misc]
            return elsewhere(spec, vault)

    class Arrays(InVault, type_handlers.ArrayHandler): ...

    class NumPys(InVault, type_handlers.NumpyHandler): ...

    return Arrays(array_metadata_store=Store()), NumPys()


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_tree_is_saved_where_a_handler_says(use_ocdbt: bool, tmp_path: Path) -> None:
    arrays, numpys = handlers_of(tmp_path / "vault")
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, numpys), (int, type_handlers.ScalarHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, type_handler_registry=registry)
    tree = {**TREE, "j": on(TREE["w"], (2, 4), "x", "y")}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(tree))
        placed = {name: ocp.ArrayRestoreArgs(sharding=tree["j"].sharding) for name in ("j",)}
        restore_args = {name: placed.get(name, ocp.RestoreArgs()) for name in tree}
        back = checkpointer.restore(tmp_path / "c", args=ocp.args.PyTreeRestore(tree, restore_args))

    assert {path.name for path in (tmp_path / "vault").iterdir()} == {"b", "j", "w"}
    assert back["step"] == 3
    for name in ("b", "j", "w"):
        np.testing.assert_array_equal(back[name], tree[name])

    assert back["j"].sharding == tree["j"].sharding


@pytest.mark.parametrize("kind", ["jax", "numpy"])
async def test_chunks_and_codecs_are_those_of_the_spec(kind: str, tmp_path: Path) -> None:
    """Chunks that parts of a sharded array do not fit, with another codec."""
    base: Any = type_handlers.ArrayHandler if kind == "jax" else type_handlers.NumpyHandler

    class Chunked(base):  # type: ignore[misc]  # one or the other
        def _get_json_tspec_write(self, info: Any, value: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            spec: dict[str, Any] = super()._get_json_tspec_write(info, value, *args, **kwargs)
            assert tuple(value.shape) == (8, 12)
            spec["metadata"] |= {"chunks": [3, 5], "compressor": {"id": "gzip", "level": 1}}
            return spec

    leaves = infos("penstock", tmp_path, ["w"], is_ocdbt_checkpoint=False)
    value = on(TREE["w"], (2, 4), "x", "y") if kind == "jax" else TREE["w"]
    for future in await Chunked().serialize([value], leaves, [ocp.SaveArgs(dtype=np.dtype(np.float64))]):
        await anyio.to_thread.run_sync(future.result)

    form = json.loads((tmp_path / "w" / ".zarray").read_text())
    assert (form["chunks"], form["compressor"]["id"], form["dtype"]) == ([3, 5], "gzip", "<f8")
    (back,) = await type_handlers.NumpyHandler().deserialize(leaves)
    np.testing.assert_array_equal(back, TREE["w"])


async def test_another_dtype_of_the_spec_is_stored(tmp_path: Path) -> None:
    class Halved(type_handlers.ArrayHandler):
        def _get_json_tspec_write(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {**super()._get_json_tspec_write(*args, **kwargs), "dtype": "bfloat16"}

    leaves = infos("penstock", tmp_path, ["b"], is_ocdbt_checkpoint=False)
    for future in await Halved().serialize([jnp.arange(5.0)], leaves):
        await anyio.to_thread.run_sync(future.result)

    (back,) = await type_handlers.NumpyHandler().deserialize(leaves)
    assert back.dtype == jnp.bfloat16
    assert back.tolist() == [0, 1, 2, 3, 4]


async def test_what_an_override_raises_is_raised_and_nothing_is_written(tmp_path: Path) -> None:
    class Refusing(type_handlers.NumpyHandler):
        def _get_json_tspec_write(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            raise KeyError("no key for this place")

    async def save() -> None:
        leaves = infos("penstock", tmp_path, ["w"], is_ocdbt_checkpoint=True)
        for future in await Refusing().serialize([TREE["w"]], leaves):
            await anyio.to_thread.run_sync(future.result)

    with pytest.raises(KeyError, match="no key for this place"):
        await save()

    assert list(tmp_path.iterdir()) == []
