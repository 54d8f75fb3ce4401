"""Orbax as its documentation shows it, and penstock under the same names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import jax
import orbax.checkpoint as ocp
from tests.bench.contenders.protocol import Blocking, Saved
from tests.bench.results import Operation
from tests.bench.trees import State, ready

import penstock.orbax

RESTORES = frozenset(
    {
        Operation.RESTORE_JAX,
        Operation.RESTORE_NUMPY,
        Operation.COLD_NUMPY,
        Operation.RESHARD,
        Operation.METADATA,
    }
)
SAVES = frozenset({Operation.SAVE, Operation.SECOND_SAVE})


@final
class Orbax:
    """The blocking Checkpointer with a PyTreeCheckpointHandler, which the timed restores use, too."""

    def __init__(self, label: str = "Orbax", module: Any = ocp, **options: Any) -> None:
        self.label = self.checkpoint = label
        self.operations = SAVES | RESTORES
        self._module = module
        self._checkpointer = module.Checkpointer(module.PyTreeCheckpointHandler(**options))

    def save(self, path: Path, state: State) -> Saved:
        self._checkpointer.save(path, args=self._module.args.PyTreeSave(state.tree))
        return Saved()

    def restore(self, path: Path, target: State) -> Any:
        restore_args = self._module.checkpoint_utils.construct_restore_args(target.tree)
        arguments = self._module.args.PyTreeRestore(target.tree, restore_args=restore_args)
        return ready(self._checkpointer.restore(path, args=arguments))

    def metadata(self, path: Path) -> object:
        return self._checkpointer.metadata(path)

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        return iter(jax.tree.leaves(restored))


@final
class OrbaxAsync:
    """The AsyncCheckpointer: only saves, staged when `save` returns."""

    operations = frozenset({Operation.SAVE})

    def __init__(self, label: str = "Orbax async", module: Any = ocp) -> None:
        self.label = self.checkpoint = label
        self._args = module.args
        self._checkpointer = module.AsyncCheckpointer(module.PyTreeCheckpointHandler())

    def save(self, path: Path, state: State) -> Saved:
        since = time.perf_counter()
        self.begin(path, state)
        staged_s = time.perf_counter() - since
        self.finish()
        return Saved(staged_s)

    def begin(self, path: Path, state: State) -> None:
        self._checkpointer.save(path, args=self._args.PyTreeSave(state.tree))

    def finish(self) -> None:
        self._checkpointer.wait_until_finished()

    def restore(self, path: Path, target: State) -> Any:
        raise NotImplementedError

    def metadata(self, path: Path) -> object:
        raise NotImplementedError

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        raise NotImplementedError


@final
class Manager:
    """A CheckpointManager with its defaults, made for the first step of a new directory: only saves."""

    operations = frozenset({Operation.SAVE})

    def __init__(self, label: str = "Orbax manager", module: Any = ocp) -> None:
        self.label = self.checkpoint = label
        self._module = module

    def save(self, path: Path, state: State) -> Saved:
        with self._module.CheckpointManager(path) as manager:
            since = time.perf_counter()
            manager.save(0, args=self._module.args.PyTreeSave(state.tree))
            staged_s = time.perf_counter() - since
            manager.wait_until_finished()
            return Saved(staged_s)

    def restore(self, path: Path, target: State) -> Any:
        raise NotImplementedError

    def metadata(self, path: Path) -> object:
        raise NotImplementedError

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        raise NotImplementedError


def variants() -> list[Blocking]:
    """With its defaults, in the background, and without compression; and penstock under its name."""
    own = OrbaxAsync("penstock.orbax async", penstock.orbax)
    return [Orbax(), OrbaxAsync(), Orbax("Orbax uncompressed", use_compression=False), own]


def more_variants() -> list[Blocking]:
    """Its manager, and what else there is of penstock under its names."""
    blocking = Orbax("penstock.orbax", penstock.orbax)
    return [Manager(), Manager("penstock.orbax manager", penstock.orbax), blocking]
