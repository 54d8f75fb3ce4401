"""Files without structure: safetensors, and `numpy.save` for each leaf. Names are made beforehand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from safetensors.numpy import load_file, save_file
from tests.bench.contenders.protocol import Saved
from tests.bench.results import Operation
from tests.bench.trees import State, ready

OPERATIONS = frozenset(
    {
        Operation.SAVE,
        Operation.SECOND_SAVE,
        Operation.RESTORE_JAX,
        Operation.RESTORE_NUMPY,
        Operation.COLD_NUMPY,
        Operation.RESHARD,
    }
)


@final
class Safetensors:
    """One file, synced with its directory; into jax by one `device_put` of all leaves."""

    label = checkpoint = "safetensors"
    operations = OPERATIONS

    def save(self, path: Path, state: State) -> Saved:
        path.mkdir()
        name = path / "tree.safetensors"
        save_file(
            {name: np.asarray(leaf) for name, leaf in zip(state.names, state.leaves, strict=True)}, name
        )
        sync(name)
        sync(path)
        sync(path.parent)
        return Saved()

    def restore(self, path: Path, target: State) -> Any:
        loaded = load_file(path / "tree.safetensors")
        return placed([loaded[name] for name in target.names], target)

    def metadata(self, path: Path) -> object:
        raise NotImplementedError

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        return iter(restored)


@final
class Numpy:
    """A file for each leaf, all synced after the last is written."""

    label = checkpoint = "numpy"
    operations = OPERATIONS

    def save(self, path: Path, state: State) -> Saved:
        path.mkdir()
        for at, leaf in enumerate(state.leaves):
            np.save(path / f"{at}.npy", np.asarray(leaf))

        for at in range(len(state.leaves)):
            sync(path / f"{at}.npy")

        sync(path)
        sync(path.parent)
        return Saved()

    def restore(self, path: Path, target: State) -> Any:
        # numpy does not know bfloat16 and gives its bytes back as plain ones.
        loaded = [np.load(path / f"{at}.npy").view(leaf.dtype) for at, leaf in enumerate(target.leaves)]
        return placed(loaded, target)

    def metadata(self, path: Path) -> object:
        raise NotImplementedError

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        return iter(restored)


def placed(loaded: list[Any], target: State) -> list[Any]:
    """Put on devices what `target` wants there."""
    if isinstance(target.leaves[0], np.ndarray):
        return loaded

    shardings = [leaf.sharding for leaf in target.leaves]
    on_devices: list[Any] = ready(jax.device_put(loaded, shardings))
    return on_devices


def sync(path: Path) -> None:
    """Make a file, or the entries of a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def variants() -> list[Safetensors | Numpy]:
    return [Safetensors(), Numpy()]
