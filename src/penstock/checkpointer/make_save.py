"""What a caller of `save` asked for becomes a save that can be started."""

from __future__ import annotations

__all__ = ("SaveOptions", "make_save")

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from penstock.checkpointer.engine import Compare, Engine
from penstock.checkpointer.lifetime import Lifetime
from penstock.checkpointer.pipelines import First, fitting_pipeline, prioritised
from penstock.checkpointer.save_items import for_items
from penstock.checkpointer.save_task import SaveTask
from penstock.handlers.formats.items.item_types import Composite
from penstock.kernel.messages.save import TreeToSave
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun


@final
@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The options of `Checkpointer.save`, which says what they mean."""

    overwrite: bool
    prioritise: First | None
    custom_metadata: Mapping[str, Any] | None
    pipeline: Pipeline[SaveRun] | None
    save_args: object
    base: str | os.PathLike[str] | None
    compare: Compare


async def make_save(
    life: Lifetime, engine: Engine, pipeline: Pipeline[SaveRun], path: str, tree: object, options: SaveOptions
) -> SaveTask:
    """Return a save that was not started. It alone holds the tree, once the caller lets go of it.

    Args:
        life: Of the Checkpointer, which must be open.
        engine: Of the Checkpointer.
        pipeline: The stages, unless the options have others.
        path: The destination, absolute.
        tree: A tree, or a `Composite` of named items.
        options: What was asked for.

    Raises:
        ClosedError: If the Checkpointer is not open.
        SpecError: If the options do not fit, or the pipeline cannot work.
        PenstockError: If an earlier save failed and nobody was told yet.
    """
    _, threads = life.running()
    life.background.raise_unseen()
    save_args, first = options.save_args, options.prioritise
    if isinstance(tree, Composite):
        engine, tree, save_args, first = await threads.run(for_items, engine, tree, save_args, first)

    run = engine.save_run(
        path,
        threads,
        overwrite=options.overwrite,
        custom_metadata=options.custom_metadata,
        save_args=save_args,
        base=options.base,
        compare=options.compare,
    )
    chosen = pipeline if options.pipeline is None else fitting_pipeline(options.pipeline, engine.layout)
    chosen = prioritised(chosen, first)
    chosen.check(TreeToSave)
    turn, undo_s = life.background.turn(path), engine.config.stopping.undo_s
    return SaveTask(chosen, run, TreeToSave(tree, chosen.spec_changes), turn, undo_s)
