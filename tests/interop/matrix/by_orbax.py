"""What Orbax writes, with each of its options, and penstock reads."""

from __future__ import annotations

__all__ = ("WRITTEN_BY_ORBAX",)

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1 as ocp_v1
from tests.interop.matrix.model import Asked, Reader, Section, Tree, Writer, on, whole_tree

import penstock
from penstock import LeafMetadata

_ocp: Any = ocp
_v1: Any = ocp_v1
_struct: Any = jax.ShapeDtypeStruct

Save = Callable[[Path, Tree], None]


def without_name(tree: Tree) -> Tree:
    """For those that refuse strings."""
    return {name: value for name, value in tree.items() if name != "name"}


def v0_pytree(save_args: Any = None, file_size: int | None = None, **options: Any) -> Save:
    def save(path: Path, tree: Tree) -> None:
        args = None if save_args is None else jax.tree.map(lambda leaf: save_args(leaf), tree)
        asked = _ocp.args.PyTreeSave(tree, save_args=args, ocdbt_target_data_file_size=file_size)
        with _ocp.Checkpointer(_ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(path / "a", asked)

    return save


def v0_standard(path: Path, tree: Tree) -> None:
    with _ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "a", without_name(tree))


def v0_manager(args: Callable[[Tree], Any]) -> Save:
    def save(path: Path, tree: Tree) -> None:
        with _ocp.CheckpointManager(path / "a", metadata={"root": 1}) as manager:
            for step, saved in ((7, {"other": np.arange(2)}), (11, tree)):
                manager.save(step, args=args(saved))

    return save


def v0_composite(tree: Tree) -> Any:
    return _ocp.args.Composite(config=_ocp.args.JsonSave({"a": 1}), train=_ocp.args.PyTreeSave(tree))


def v1_context(**options: Any) -> Any:
    context = _v1.Context()
    for name, value in options.items():
        place, _, last = name.rpartition("__")
        setattr(getattr(context.array.saving, place) if place else context.array.saving, last, value)

    return context


def v1_save(**options: Any) -> Save:
    def save(path: Path, tree: Tree) -> None:
        with v1_context(**options):
            _v1.save(str(path / "a"), tree)

    return save


def v1_checkpointables(path: Path, tree: Tree) -> None:
    _v1.save_checkpointables(str(path / "a"), {"state": tree, "other": {"x": np.arange(3)}})


def v1_training(path: Path, tree: Tree) -> None:
    with _v1.training.Checkpointer(str(path / "a")) as checkpointer:
        checkpointer.save(7, {"other": np.arange(2)})
        checkpointer.save(11, tree, metrics={"loss": 0.5})


def v1_partial(path: Path, tree: Tree) -> None:
    names = sorted(tree)
    for part in (names[:3], names[3:]):
        _v1.partial.save(str(path / "a"), {name: tree[name] for name in part})
    _v1.partial.finalize(str(path / "a"))


def chunked(leaf: Any) -> Any:
    return _ocp.SaveArgs(chunk_byte_size=200)


def cut(leaf: Any) -> Any:
    is_matrix = getattr(leaf, "ndim", 0) == 2
    return _ocp.SaveArgs(chunk_byte_size=300, shard_axes=(0,) if is_matrix else ())


def half(leaf: Any) -> Any:
    return _ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16)) if is_float32(leaf) else _ocp.SaveArgs()


def is_float32(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == np.float32


def halved(tree: Tree, variant: str) -> Tree:
    cast_them = variant.startswith("dtype")
    found = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if cast_them and is_float32(x) else x, tree)
    return cast("Tree", found)


def v0_formats() -> dict[str, Save]:
    found: dict[str, Save] = {}
    for ocdbt, zarr3, zstd in itertools.product((True, False), repeat=3):
        label = f"use_ocdbt={ocdbt}, use_zarr3={zarr3}, use_compression={zstd}"
        found[label] = v0_pytree(use_ocdbt=ocdbt, use_zarr3=zarr3, use_compression=zstd)
    return found


def v0_save_args() -> dict[str, Save]:
    found: dict[str, Save] = {}
    for label, save_args in {"chunk_byte_size": chunked, "shard_axes": cut, "dtype": half}.items():
        found[f"{label}, OCDBT"] = v0_pytree(save_args)
        found[f"{label}, directories"] = v0_pytree(
            save_args, use_ocdbt=False, use_zarr3=True, use_compression=False
        )
    return found | {"ocdbt_target_data_file_size": v0_pytree(file_size=1000)}


WRITERS: Final = [
    Writer(
        "v0 `PyTreeCheckpointHandler`",
        v0_formats(),
        options="all eight of `use_ocdbt`, `use_zarr3`, `use_compression`",
    ),
    Writer(
        "v0 `PyTreeSave`",
        v0_save_args(),
        expected=halved,
        options="`SaveArgs` with `chunk_byte_size`, `shard_axes`, `dtype`, each with OCDBT and directories; "
        "`ocdbt_target_data_file_size`",
    ),
    Writer(
        "v0 `StandardCheckpointer`",
        {"": v0_standard},
        expected=lambda tree, _: without_name(tree),
    ),
    Writer(
        "v0 `CheckpointManager`",
        {
            "PyTreeSave": v0_manager(lambda tree: _ocp.args.PyTreeSave(tree)),
            "StandardSave": v0_manager(lambda tree: _ocp.args.StandardSave(without_name(tree))),
            "Composite": v0_manager(v0_composite),
        },
        expected=lambda tree, variant: without_name(tree) if variant == "StandardSave" else tree,
    ),
    Writer(
        "v1 `save`",
        {
            "": v1_save(),
            "use_ocdbt=False": v1_save(use_ocdbt=False),
            "use_zarr3=False": v1_save(use_zarr3=False, use_compression=False),
            "chunk_byte_size": v1_save(storage_options__chunk_byte_size=300),
            "ocdbt_target_data_file_size": v1_save(ocdbt_target_data_file_size=1000),
        },
    ),
    Writer("v1 `save_checkpointables`", {"": v1_checkpointables}),
    Writer("v1 `training.Checkpointer`", {"": v1_training}),
    Writer("v1 `partial.save`", {"": v1_partial}),
]


def ours(asked: Asked) -> Tree:
    return cast("Tree", penstock.sync.restore(asked.path / "a"))


def ours_like(asked: Asked) -> Tree:
    return penstock.sync.restore(asked.path / "a", like=asked.like)


def ours_on_another_mesh(asked: Asked) -> Tree:
    """Onto two of the eight devices, and back, so that it can be compared."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.shape != (8, 12):
            return leaf
        return _struct(leaf.shape, leaf.dtype, sharding=on((2,), None, "x"))

    found = penstock.sync.restore(asked.path / "a", like=jax.tree.map(moved, asked.like))
    for name in ("device", "replicated"):
        assert found[name].sharding.is_equivalent_to(on((2,), None, "x"), 2)
        found[name] = jax.device_put(found[name], asked.like[name].sharding)
    return cast("Tree", found)


def ours_metadata(asked: Asked) -> Tree:
    """What is told of each leaf, and the leaf itself if that is right."""
    found = penstock.sync.metadata(asked.path / "a")

    def leaf(told: Any, value: Any) -> Any:
        if value is None or isinstance(value, dict):
            assert told.kind in {"None", "Dict"}
        elif isinstance(value, str):
            assert told.kind == "string"
        else:
            key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            array = np.asarray(jax.random.key_data(value) if key else value)
            assert (told.shape, told.dtype) == (array.shape, str(array.dtype))
            assert told.nbytes == array.nbytes
            assert told.stored_nbytes > 0
            assert (told.sharding is not None) == isinstance(value, jax.Array)
            assert told.random_key_impl == ("threefry2x32" if key else None)
        return value

    def is_leaf(node: Any) -> bool:
        return isinstance(node, LeafMetadata)

    def is_empty(node: Any) -> bool:
        return node is None or (isinstance(node, dict) and not node)

    flatten: Any = jax.tree.flatten
    told, treedef = flatten(found.tree, is_leaf=is_leaf)
    values = jax.tree.leaves(asked.like, is_leaf=is_empty)
    return cast("Tree", treedef.unflatten([leaf(*pair) for pair in zip(told, values, strict=True)]))


WRITTEN_BY_ORBAX: Final = Section(
    "What Orbax 0.12.8 writes",
    "What earlier versions wrote, from 0.2.7 on, is tried with checkpoints that they wrote (`tests/corpus`).",
    whole_tree,
    WRITERS,
    [
        Reader("`restore`", ours),
        Reader("`restore`, target", ours_like, has_target=True),
        Reader("`restore`, another mesh", ours_on_another_mesh, has_target=True),
        Reader("`metadata`", ours_metadata),
    ],
)
