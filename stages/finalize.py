"""The last stage of a save: publishes the checkpoint."""

from __future__ import annotations

__all__ = ("Finalize",)

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, final

from penstock.kernel.messages.save import Committed, Published
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.stages.reuse.value_cache import KnownValues


@final
@dataclass(frozen=True, slots=True)
class Finalize:
    """Takes the `Committed`, yields the `Published`. Until here, nothing is visible under the final name.

    Raises:
        DestinationExistsError: If another writer put something there during the save.
        OutcomeUnknownError: If the process that publishes falls silent while it does.
    """

    messages: ClassVar[Messages] = {Committed: Published}
    advice: ClassVar[Advice] = Advice(
        "It makes the new name durable, and that is up to the store: save less often, or to a "
        "faster `[store]`.",
    )

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def finalize(committed: Committed, /) -> Published:
            # The operation says who publishes: one process, the primary, or each on its own disk.
            unpublished = await run.operation.publish(run.workspace.publish)
            run.workspace.stranded = run.workspace.stranded or unpublished
            if run.workspace.left_behind is not None:  # the new checkpoint is durable nevertheless
                error = repr(run.workspace.left_behind)
                run.events.warning("save.left_behind", path=run.workspace.temporary, error=error)

            known = {run.path: committed.references}
            if run.layout.folders is not None:
                folders = await run.threads.run(run.layout.folders.by_folder, committed.references)
                known = {os.path.join(run.path, folder): found for folder, found in folders.items()}

            # So that a later save with this base links unchanged leaves without reading it.
            KnownValues(run.caches.known_values).remember(run.path, run.workspace.identity, known)
            return Published(
                run.path,
                committed.n_leaves,
                committed.nbytes,
                committed.nbytes_kept,
                single_writer=run.store.relies_on_single_writer(),
            )

        yield finalize
