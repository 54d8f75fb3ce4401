"""What a `Checkpointer` does, behind its signatures; loads everything that a save or a restore needs."""

from __future__ import annotations

__all__ = ("Operations",)

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, final

from penstock.checkpointer import pipelines
from penstock.checkpointer.background_saves import SaveOptions
from penstock.checkpointer.description import CheckpointMetadata, describe_checkpoint
from penstock.checkpointer.engine import Compare, make_engine
from penstock.checkpointer.lifetime import Lifetime
from penstock.checkpointer.pipelines import First
from penstock.checkpointer.restore_items import restore_items
from penstock.checkpointer.restore_keywords import asked_for, result_check, with_derive
from penstock.checkpointer.restore_task import RestoreTask
from penstock.checkpointer.streaming import LeafStream
from penstock.handlers.formats.items.protobuf_targets import message_target
from penstock.kernel.config.config import Config
from penstock.kernel.config.save_format import SaveArgs, SaveFormat
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.messages.restore import Only, Order, RestoreRequest
from penstock.kernel.messages.restore_options import Rename, RestoreOptions, RestoreReport, Transform
from penstock.kernel.messages.save import TreeToSave
from penstock.kernel.pipeline.futures import Milestone, SaveFuture
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun, SaveRun
from penstock.kernel.protocols.coordinator import Coordinator
from penstock.kernel.protocols.layouts import Layout
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.protocols.leaf_handlers import HandlerLookup
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import absolute_path
from penstock.verification.verify import Verification
from penstock.verification.verify_report import VerifyReport

Path: TypeAlias = str | os.PathLike[str]


@final
class Operations:
    """The engine, the pipelines and the life of one Checkpointer. `Checkpointer` says what its methods do.

    Raises:
        ConfigError, PipelineError: If an option of a stage, of the format or of the store does not fit.
    """

    __slots__ = ("_restore_pipeline", "_save_pipeline", "engine", "life")

    def __init__(
        self,
        options: Config,
        memory: MemoryRegulator,
        registry: HandlerLookup | None,
        save_pipeline: Pipeline[SaveRun] | None,
        restore_pipeline: Pipeline[RestoreRun] | None,
        store: Store | None,
        save_format: SaveFormat | None,
        layout: Layout | None,
        coordinator: Coordinator | None,
    ) -> None:
        self.engine = make_engine(options, memory, registry, store, save_format, layout, coordinator)
        layout = self.engine.layout
        saving = pipelines.save_pipeline(layout) if save_pipeline is None else save_pipeline
        restoring = pipelines.restore_pipeline() if restore_pipeline is None else restore_pipeline
        saving = pipelines.fitting_pipeline(saving, layout, joint=self.engine.is_joint)
        self._save_pipeline = pipelines.configured_pipeline(saving, options.save)
        self._restore_pipeline = pipelines.configured_pipeline(restoring, options.restore)
        self._save_pipeline.check(TreeToSave)
        self._restore_pipeline.check(RestoreRequest)
        self.life = Lifetime(self.engine)

    def with_handlers(self, registry: HandlerLookup, layout: Layout | None) -> Operations:
        """Return the same, with other handlers and perhaps another layout."""
        other = object.__new__(Operations)
        other._save_pipeline, other._restore_pipeline = self._save_pipeline, self._restore_pipeline
        other.engine = replace(self.engine, registry=registry, layout=layout or self.engine.layout)
        other.life = self.life
        return other

    async def save(
        self,
        path: Path,
        tree: object,
        until_staged: bool,
        overwrite: bool,
        prioritise: First | None,
        custom_metadata: Mapping[str, Any] | None,
        pipeline: Pipeline[SaveRun] | None,
        save_args: SaveArgs | Callable[[KeyPath], SaveArgs | None] | object,
        base: Path | None,
        compare: Compare,
    ) -> SaveFuture:
        """Begin a save; return when it is staged, or only planned."""
        options = SaveOptions(overwrite, prioritise, custom_metadata, pipeline, save_args, base, compare)
        life, final = self.life, absolute_path(path)
        threads, engine = life.running()[1], self.engine
        task = await life.background.make(threads, engine, self._save_pipeline, final, tree, options)
        del tree  # a save in the background must not keep arrays that the caller dropped
        await life.start(task, Milestone.STAGED if until_staged else Milestone.PLANNED)
        return task.future

    async def restore(
        self,
        path: Path,
        like: Any,
        as_type: object,
        *,
        mmap: bool,
        verify: bool | None,
        split: str | None,
        item: str | None,
        prioritise: First | None,
        pipeline: Pipeline[RestoreRun] | None,
        on_report: Callable[[RestoreReport], object] | None,
        only: Only | None,
        rename: Rename | None,
        transforms: Mapping[str, Transform] | None,
        transforms_default_to_original: bool,
        dtype: Any,
        strict: bool,
        on_missing: Literal["raise", "keep"],
        on_unexpected: Literal["raise", "skip"],
        max_expansion: int | None,
    ) -> Any:
        """Restore a tree."""
        threads = self.life.reading()
        final, has_like = absolute_path(path), like is not ...
        check = result_check(final, as_type)
        target, finish = message_target(like, final)
        options = RestoreOptions(
            rename=rename,
            transforms=transforms,
            transforms_default_to_original=transforms_default_to_original,
            dtype=dtype,
            strict=strict,
            on_missing=on_missing,
            on_unexpected=on_unexpected,
        )
        asked, wanted = asked_for(options, has_like=has_like), target if has_like else None
        given = self._restore_pipeline if pipeline is None else pipeline
        given = pipelines.prioritised(given, prioritise)
        given = pipelines.expanding(given, max_expansion)
        chosen, compared = pipelines.verifying(given, verify)
        request = RestoreRequest(final, wanted, has_like, asked, mmap, split, item, only, compared)
        chosen.check(RestoreRequest)
        task = RestoreTask(self.engine, threads, with_derive(chosen, asked), request)
        tree, report = await self.life.calmly(task)
        result = finish(tree)
        check(result)
        if on_report is not None:
            on_report(report)

        return result

    async def restore_items(
        self,
        restore: Callable[..., Any],
        path: Path,
        like: Mapping[str, Any] | None,
        items: Iterable[str] | None,
    ) -> dict[str, Any]:
        """Restore items by name; `restore` restores one of them."""
        threads = self.life.reading()
        return await restore_items(self.engine, threads, restore, absolute_path(path), like, items)

    def stream(
        self,
        path: Path,
        like: Any,
        order: Order | None,
        only: Only | None,
        item: str | None,
        pipeline: Pipeline[RestoreRun] | None,
    ) -> LeafStream:
        """Restore leaf by leaf."""
        (tasks, _), threads = self.life.running(), self.life.reading()
        target, has_like = (None, False) if like is ... else (like, True)
        request = RestoreRequest(absolute_path(path), target, has_like, item=item, only=only)
        chosen = self._restore_pipeline if pipeline is None else pipeline
        return self.life.streams.open(self.engine, tasks, threads, chosen, request, order)

    async def metadata(self, path: Path, item: str | None) -> CheckpointMetadata:
        """Describe a checkpoint."""
        threads = self.life.reading()
        final, engine = absolute_path(path), self.engine
        describe = partial(describe_checkpoint, engine.restore_run(final, threads), final, item)
        return await self.life.calmly(partial(engine.read_unchanged, final, threads, describe))

    async def verify(self, path: Path, item: str | None) -> VerifyReport:
        """Compare what lies below `path` with its checksums."""
        threads, engine = self.life.reading(), self.engine
        verification = Verification(engine.store, threads, engine.memory, engine.read_unchanged)
        return await self.life.calmly(partial(verification.verify, absolute_path(path), item))
