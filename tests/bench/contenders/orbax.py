"""Orbax as its documentation shows it: a Checkpointer with a PyTreeCheckpointHandler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import jax
import orbax.checkpoint as ocp
from tests.bench.contenders.protocol import Saved
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
    """The blocking Checkpointer, which the timed restores use, too."""

    def __init__(self, label: str = "Orbax", **options: Any) -> None:
        self.label = self.checkpoint = label
        self.operations = SAVES | RESTORES
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))

    def save(self, path: Path, state: State) -> Saved:
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(state.tree))
        return Saved()

    def restore(self, path: Path, target: State) -> Any:
        restore_args = ocp.checkpoint_utils.construct_restore_args(target.tree)
        arguments = ocp.args.PyTreeRestore(target.tree, restore_args=restore_args)
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


def variants() -> list[Orbax | OrbaxAsync]:
    """With its defaults, in the background, and without compression; and penstock under its name."""
    own = OrbaxAsync("penstock.orbax async", penstock.orbax)
    return [Orbax(), OrbaxAsync(), Orbax("Orbax uncompressed", use_compression=False), own]
