"""Who reads what whom wrote: writers, each with its options, and readers, as a table has rows and columns."""

from __future__ import annotations

__all__ = ("Asked", "Reader", "Section", "Tree", "Writer", "on", "same", "whole_tree", "without_strings")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree: TypeAlias = dict[str, Any]


def same(tree: Tree, variant: str) -> Tree:
    """What is stored of a tree if nothing is changed."""
    return tree


@dataclass(frozen=True)
class Writer:
    """One way of writing, tried with several options."""

    label: str
    variants: Mapping[str, Callable[[Path, Tree], None]]  #: each puts the tree where readers look for it
    expected: Callable[[Tree, str], Tree] = same  #: what a variant stores of the tree
    options: str = ""  #: what the variants are, for the page, if their names do not say it well
    cannot: Mapping[str, str] = field(default_factory=dict[str, str])  #: why some readers fail, by label


@dataclass(frozen=True)
class Asked:
    """What a reader is asked for."""

    path: Path  #: where the writer put things
    like: Tree  #: what should come back, nodes and leaf types included


@dataclass(frozen=True)
class Reader:
    """One way of reading. It returns what it read, as dicts and lists unless it was given a target."""

    label: str
    read: Callable[[Asked], Tree]
    has_target: bool = False


@dataclass(frozen=True)
class Section:
    """A table: all writers with all readers."""

    title: str
    text: str
    tree: Callable[[], Tree]
    writers: Sequence[Writer]
    readers: Sequence[Reader]


def on(shape: tuple[int, ...], *axes: str | None) -> Any:
    devices: Any = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, ("x", "y")[: len(shape)]), PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's


def whole_tree() -> Tree:
    """Every kind of leaf and container, and arrays that are worth a codec."""
    square = np.arange(96, dtype=np.float32).reshape(8, 12)
    noise = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    return {
        "bf16": jnp.asarray(noise[0], jnp.bfloat16),
        "device": jax.device_put(square, on((2, 4), "x", "y")),
        "host": noise,
        "inner": [{"a": jnp.float32(2.5)}, None, {}, 3, 1.5, True],
        "int4": np.arange(-4, 4).astype(jnp.int4),
        "key": jax.random.split(jax.random.key(1), 2),
        "name": "text",
        "replicated": jax.device_put(square, on((2, 4), None, "y")),
        "zeros": np.zeros((64, 96), np.float32),
    }


def without_strings() -> Tree:
    """For those that refuse them."""
    return {name: value for name, value in whole_tree().items() if name != "name"}
