"""Safetensors files that penstock, the safetensors package and Orbax exchange."""

from __future__ import annotations

__all__ = ("SAFETENSORS",)

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint.experimental import v1 as ocp_v1
from safetensors.numpy import load_file, save_file
from tests.interop.matrix.model import Asked, Reader, Section, Tree, Writer

import penstock

_v1: Any = ocp_v1


def tensors() -> Tree:
    """A flat dict, which is all that the format knows."""
    noise = np.random.default_rng(0).standard_normal((6, 5))
    return {
        "a.b": noise.astype(np.float32),
        "a.c": noise.astype(np.float16),
        "bf16": noise.astype(jnp.bfloat16),
        "i": np.arange(7),
    }


def exported(name: str, **options: Any) -> Callable[[Path, Tree], None]:
    def save(path: Path, tree: Tree) -> None:
        penstock.sync.export_safetensors(tree, path / name, **options)

    return save


def converted(path: Path, tree: Tree) -> None:
    penstock.sync.save(path / "orbax", tree)
    penstock.sync.convert(path / "orbax", path / "x.safetensors")


def of_the_package(path: Path, tree: Tree) -> None:
    (path / "x").mkdir()
    for at, name in enumerate(sorted(tree)):
        save_file({name: tree[name]}, path / "x" / f"part{at}.safetensors")


def place(path: Path) -> Path:
    return next(found for found in (path / "x.safetensors", path / "x") if found.exists())


def package(asked: Asked) -> Tree:
    found = place(asked.path)
    files = sorted(found.glob("*.safetensors")) if found.is_dir() else [found]
    return {name: array for file in files for name, array in load_file(file).items()}


def orbax(asked: Asked) -> Tree:
    context = _v1.Context()
    context.checkpoint_layout = _v1.options.CheckpointLayout.SAFETENSORS
    with context:
        return cast("Tree", _v1.load(str(place(asked.path))))


def ours(asked: Asked) -> Tree:
    return cast("Tree", penstock.sync.restore(place(asked.path)))


def ours_like(asked: Asked) -> Tree:
    return penstock.sync.restore(place(asked.path), like=asked.like)


SAFETENSORS: Final = Section(
    "Safetensors",
    "A file, or a folder of them.",
    tensors,
    [
        Writer(
            "`penstock.export_safetensors`",
            {"a file": exported("x.safetensors"), "a folder": exported("x", max_shard_bytes=100)},
        ),
        Writer("`penstock.convert`", {"a file": converted}),
        Writer("the safetensors package", {"a folder": of_the_package}),
    ],
    [
        Reader("safetensors", package),
        Reader("v1 `load`", orbax),
        Reader("penstock", ours),
        Reader("penstock, target", ours_like, has_target=True),
    ],
)
