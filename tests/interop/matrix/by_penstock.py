"""What penstock writes, and Orbax, TensorStore and zarr-python read."""

from __future__ import annotations

__all__ = ("WRITTEN_BY_PENSTOCK",)

import itertools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint.experimental import v1 as ocp_v1
from tests.interop.matrix.model import Asked, Reader, Section, Tree, Writer, whole_tree

import penstock
from penstock import SaveArgs, SaveFormat
from penstock.handlers import Composite
from penstock.items import Json

# What they return is typed as their callers know it, and so is what is handed on.
_ocp: Any = ocp
_v1: Any = ocp_v1
_ts: Any = ts

STEP: Final = 3

# Penstock writes: at `flat` a tree alone, and below `steps` the same as the item of a step.


def cut_rows(keys: tuple[str, ...]) -> SaveArgs | None:
    return SaveArgs(shard_axes=(0,)) if keys[-1] in ("host", "device") else None


def by_penstock(
    form: SaveFormat, args: Callable[[Any], SaveArgs | None] | None = None
) -> Callable[[Path, Tree], None]:
    def save(path: Path, tree: Tree) -> None:
        keywords: Any = {} if args is None else {"save_args": args}
        with penstock.sync.Checkpointer(save_format=form) as checkpointer:
            checkpointer.save(path / "flat", tree, **keywords).result()
            items = Composite(default=tree, config=Json({"lr": 0.5}))
            checkpointer.save(path / "steps" / str(STEP), items, **keywords).result()

    return save


def formats(*, ocdbt: bool, zarr: Any) -> dict[str, Callable[[Path, Tree], None]]:
    def form(**options: Any) -> Callable[[Path, Tree], None]:
        return by_penstock(SaveFormat(ocdbt=ocdbt, zarr=zarr, **options))

    found = {codec: form(codec=codec) for codec in ("none", "floats", "floats:archive", "zstd:3", "auto")}
    found["chunk_byte_size"] = form(chunk_byte_size=1000)
    found["chunk_byte_size, zstd"] = form(chunk_byte_size=1500, codec="zstd")
    found["shard_axes"] = by_penstock(SaveFormat(ocdbt=ocdbt, zarr=zarr), cut_rows)
    if ocdbt:
        found["ocdbt_target_data_file_size"] = form(ocdbt_target_data_file_size=1000)
        found["ocdbt_target_data_file_size, zstd"] = form(ocdbt_target_data_file_size=0, codec="zstd")

    return found


def v0_pytree(asked: Asked) -> Tree:
    with _ocp.PyTreeCheckpointer() as checkpointer:
        return cast("Tree", checkpointer.restore(asked.path / "flat"))


def v0_pytree_like(asked: Asked) -> Tree:
    restore_args = _ocp.checkpoint_utils.construct_restore_args(asked.like)
    with _ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(asked.path / "flat", item=asked.like, restore_args=restore_args)
        return cast("Tree", found)


def v0_standard(asked: Asked) -> Tree:
    with _ocp.StandardCheckpointer() as checkpointer:
        return cast("Tree", checkpointer.restore(asked.path / "flat"))


def v0_manager(asked: Asked) -> Tree:
    with _ocp.CheckpointManager(asked.path / "steps") as manager:
        return cast("Tree", manager.restore(STEP))


def v0_manager_args(asked: Asked) -> Tree:
    with _ocp.CheckpointManager(asked.path / "steps") as manager:
        return cast("Tree", manager.restore(STEP, args=_ocp.args.PyTreeRestore()))


def v1_load(asked: Asked) -> Tree:
    return cast("Tree", _v1.load(str(asked.path / "flat")))


def v1_load_like(asked: Asked) -> Tree:
    def abstract(leaf: Any) -> Any:
        return _ocp.utils.to_shape_dtype_struct(leaf) if isinstance(leaf, jax.Array) else leaf

    return cast("Tree", _v1.load(str(asked.path / "flat"), jax.tree.map(abstract, asked.like)))


def v1_checkpointables(asked: Asked) -> Tree:
    found = _v1.load_checkpointables(str(asked.path / "steps" / str(STEP)), {"default": None})
    return cast("Tree", found["default"])


def v1_training(asked: Asked) -> Tree:
    with _v1.training.Checkpointer(str(asked.path / "steps")) as checkpointer:
        return cast("Tree", checkpointer.load(checkpointable_name="default"))


def of_tensorstore(asked: Asked) -> Tree:
    """The arrays, one by one, by the driver of their format; the rest is as it was asked for."""
    path = asked.path / "flat"
    ocdbt = (path / "manifest.ocdbt").exists()

    def read(name: str) -> Any:
        base: Any = {"driver": "file", "path": f"{path}/" if ocdbt else f"{path}/{name}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if ocdbt else base
        for driver in ("zarr", "zarr3"):
            try:
                return _ts.open({"driver": driver, "kvstore": kvstore}).result().read().result()
            except ValueError:
                continue
        raise AssertionError(name)

    names = ("host", "zeros", "bf16")
    found = {name: read(name) for name in names}
    return {**asked.like, **found, "bf16": jnp.asarray(found["bf16"])}


def of_zarr(asked: Asked) -> Tree:
    """The arrays whose types zarr-python knows, one by one; the rest is as it was asked for."""
    zarr: Any = import_module("zarr")  # only where it is installed

    found = {name: zarr.open_array(asked.path / "flat" / name, mode="r")[...] for name in ("host", "zeros")}
    return {**asked.like, **found}


def ours(asked: Asked) -> Tree:
    return cast("Tree", penstock.sync.restore(asked.path / "flat"))


def ours_like(asked: Asked) -> Tree:
    return penstock.sync.restore(asked.path / "flat", like=asked.like)


def ours_steps(asked: Asked) -> Tree:
    return cast("Tree", penstock.sync.restore(asked.path / "steps"))


NO_DATABASES: Final = {"zarr-python": "knows no OCDBT databases"}

WRITTEN_BY_PENSTOCK: Final = Section(
    "What penstock writes",
    "What `SaveFormat` chooses, and along which axes `SaveArgs` cuts.",
    whole_tree,
    [
        Writer(
            f"{'OCDBT' if ocdbt else 'directories'}, zarr v{zarr}",
            formats(ocdbt=ocdbt, zarr=zarr),
            cannot=NO_DATABASES if ocdbt else {},
        )
        for ocdbt, zarr in itertools.product((True, False), (2, 3))
    ],
    [
        Reader("v0 `PyTreeCheckpointer`", v0_pytree),
        Reader("v0 `PyTreeCheckpointer`, target", v0_pytree_like, has_target=True),
        Reader("v0 `StandardCheckpointer`", v0_standard),
        Reader("v0 `CheckpointManager`", v0_manager),
        Reader("v0 `CheckpointManager`, args", v0_manager_args),
        Reader("v1 `load`", v1_load),
        Reader("v1 `load`, target", v1_load_like, has_target=True),
        Reader("v1 `load_checkpointables`", v1_checkpointables),
        Reader("v1 `training.Checkpointer`", v1_training),
        Reader("TensorStore", of_tensorstore),
        Reader("zarr-python", of_zarr),
        Reader("penstock", ours),
        Reader("penstock, target", ours_like, has_target=True),
        Reader("penstock, steps", ours_steps),
    ],
)
