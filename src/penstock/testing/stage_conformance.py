"""Tests of what every stage must do. Public as `penstock.testing.StageConformance`."""

from __future__ import annotations

__all__ = ("StageConformance",)

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import anyio
import jax
import numpy as np

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.checkpointer.pipelines import restore_pipeline, save_pipeline
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun, SaveRun
from penstock.testing.operation_faults import Trial, demand


class StageConformance(ABC):
    """Tests of a stage in its pipeline. Subclass it as `TestMyStage`, and say where the stage goes.

    A tree is saved and restored by whole pipelines, on every event loop that is installed. If the stage
    changes what is restored, override `expected`.

    Attributes:
        memory_limit: Of the Checkpointer, in bytes; small, so that leaves come in pieces.
    """

    memory_limit: int = 20_000

    @abstractmethod
    def pipelines(
        self, saving: Pipeline[SaveRun], restoring: Pipeline[RestoreRun]
    ) -> tuple[Pipeline[SaveRun], Pipeline[RestoreRun]]:
        """Return the pipelines with the stage in them, made anew for each Checkpointer."""

    def tree(self) -> Any:
        """Return what is saved: by default NumPy arrays, one larger than the budget, and a number."""
        return {"large": np.arange(5000), "list": [np.ones(3, np.float32), np.full((2, 3), 4)], "step": 7}

    def expected(self, tree: Any) -> Any:
        """Return the tree expected from the restore: by default the same."""
        return tree

    def same(self, found: Any, expected: Any) -> bool:
        """Return whether the restored tree is the expected one."""
        return _same(found, expected)

    def test_every_stage_has_a_worker(self) -> None:
        for pipeline in self.pipelines(save_pipeline(), restore_pipeline()):
            for slot in pipeline:
                demand(slot.workers >= 1, f"{slot.name} needs at least one worker")

    def test_a_tree_is_saved_and_restored(self, tmp_path: Path) -> None:
        trial = self._trial(tmp_path)
        trial.run(trial.there_and_back)

    def test_a_tree_without_leaves_is_saved_and_restored(self, tmp_path: Path) -> None:
        trial = Trial(str(tmp_path), {}, {}, self.same, self._options)
        trial.run(trial.there_and_back)

    def test_one_stage_serves_several_saves_at_once(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with Checkpointer(**self._options()) as checkpointer:

                async def there_and_back(name: str) -> None:
                    await (await checkpointer.save(tmp_path / name, self.tree(), overwrite=True))
                    found = await checkpointer.restore(tmp_path / name)
                    demand(self.same(found, self.expected(self.tree())), f"restored is {found!r}")

                async with anyio.create_task_group() as tasks:
                    for name in "abc":
                        tasks.start_soon(there_and_back, name)

                demand(checkpointer.statistics().leased == 0, "bytes of the budget were not given back")

        self._trial(tmp_path).run(work)

    def test_a_save_that_fails_or_is_cancelled_anywhere_leaves_nothing(self, tmp_path: Path) -> None:
        trial = self._trial(tmp_path)
        trial.sweep_save()

    def test_a_restore_that_is_cancelled_anywhere_holds_nothing(self, tmp_path: Path) -> None:
        trial = self._trial(tmp_path)
        trial.sweep_restore()

    def _trial(self, tmp_path: Path) -> Trial:
        tree = self.tree()
        return Trial(str(tmp_path), tree, self.expected(tree), self.same, self._options)

    def _options(self) -> Mapping[str, Any]:
        saving, restoring = self.pipelines(save_pipeline(), restore_pipeline())
        return {
            "save_pipeline": saving,
            "restore_pipeline": restoring,
            "memory_limit": self.memory_limit,
        }


def _same(found: Any, expected: Any) -> bool:
    structure: Any = cast("Any", jax).tree.structure  # which has no types
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return bool(structure(found) == structure(expected)) and all(_same_leaf(*pair) for pair in pairs)


def _same_leaf(found: Any, expected: Any) -> bool:
    a, b = np.asarray(found), np.asarray(expected)
    return type(found) is type(expected) and a.dtype == b.dtype and np.array_equal(a, b)
