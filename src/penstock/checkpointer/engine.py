"""The parts of a Checkpointer, and what each save or restore gets from them."""

from __future__ import annotations

__all__ = ("Engine", "coordinator_of_jax", "make_engine", "needed_besides", "processes_of_jax")

import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

from anyio import Lock
from structlog.stdlib import BoundLogger

from penstock.checkpointer.parts import CheckpointerParts
from penstock.checkpointer.pipelines import FittedPipelines
from penstock.checkpointer.progress import shown_progress
from penstock.config.config import Config, FlowOptions
from penstock.event_loop.imports import NeededModules
from penstock.event_loop.interpreter_settings import calm_part
from penstock.handlers.coordinators.job_options import JobLimits, JobOptions
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.orbax.storage_choice import CODED_CHUNK
from penstock.handlers.layouts.auto_layout import AutoLayout
from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.handlers.stores.publishing.paths import path_or_url, scheme_of
from penstock.handlers.stores.publishing.reading import Reading, Snapshots, read_unchanged, reading
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import (
    ConfigError,
    SpecError,
)
from penstock.kernel.events import get_logger
from penstock.kernel.memory.bounded_cache import BoundedCache, Caching
from penstock.kernel.memory.regulator import Flow, MemoryRegulator
from penstock.kernel.pipeline.run_context import (
    HandlerWork,
    ProgressMeter,
    RestoreRun,
    RunCaches,
    RunLimits,
    SaveRequest,
    SaveRun,
    ShowProgress,
    piece_bytes_within,
)
from penstock.kernel.protocols.coordinator import (
    Coordinator,
    Operation,
    SharedReads,
    SharesReads,
    SingleProcessCoordinator,
)
from penstock.kernel.protocols.layouts import Layout
from penstock.kernel.protocols.leaf_handlers import HandlerLookup
from penstock.kernel.protocols.stores import Store
from penstock.kernel.registry import SCHEMES
from penstock.reports.kept_reports import ReportKeeper
from penstock.stores.store_finder import StoreFinder
from penstock.telemetry.observers import Observer, TellReport, modules_of_observers, observed, observers_of

if TYPE_CHECKING:
    from penstock.kernel.pipeline.pipeline import Pipeline

T = TypeVar("T")
# Smaller writes wait for the latency of the disk instead of its bandwidth.
MOST_PIECES: Final = 256
"""Pieces per message: planning this many takes the event loop about a millisecond."""


NEEDED_TOGETHER: Final[NeededModules] = {
    "penstock.handlers.coordinators.jax_key_values": "JaxKeyValues",
    "penstock.handlers.leaves.shards": "parts_here",
    "penstock.handlers.leaves.single_replica": "broadcast_together",
    "penstock.handlers.coordinators.recorded_answers": "AnsweredStore",
    "penstock.handlers.coordinators.job_coordinator": "JobCoordinator",
    "penstock.stages.agree": "Agree",
    "penstock.stages.joint.division": "divided",
    "penstock.stages.joint_commit": "JointCommit",
}
"""What only a job of several processes needs."""


@final
@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that all saves and restores of one Checkpointer share."""

    config: Config
    memory: MemoryRegulator
    registry: HandlerLookup
    store: Store
    layout: Layout | AutoLayout
    coordinator: Coordinator
    events: BoundLogger
    stores: StoreFinder
    bucket_layouts: Mapping[int, Layout | AutoLayout]
    """Of what is saved to buckets, by the length of a data file: large arrays are cut to that size. A layout
    that the caller gave is used as it is, and not among them."""
    report_keeper: ReportKeeper  #: one of the observers
    pipelines: FittedPipelines
    saving: Pipeline[SaveRun]
    restoring: Pipeline[RestoreRun]
    caches: RunCaches = field(default_factory=RunCaches)
    views: Snapshots = field(default_factory=Snapshots)
    replica_turn: Lock = field(default_factory=Lock)  #: has restores that broadcast follow each other
    observers: tuple[Observer, ...] = ()  #: of every save and restore
    on_progress: Callable[[int, int], object] | None = None  #: called with the bytes done and all bytes

    @property
    def written(self) -> Layout:
        """The layout that saves write with."""
        return self.layout.written if isinstance(self.layout, AutoLayout) else self.layout

    def at(self, path: str) -> Engine:
        """Return the engine for an absolute path or a URL: with its store, and what fits that."""
        scheme = scheme_of(path)
        if scheme is None:
            return self

        store, layout = self.stores.at(path), self.layout
        if store is not self.store:
            layout = self.bucket_layouts.get(self.config.store.of_scheme(scheme).file_bytes, layout)

        saving, restoring = self.pipelines.of_scheme(scheme)
        return replace(self, store=store, layout=layout, saving=saving, restoring=restoring)

    @property
    def codec(self) -> str | None:
        """The codec that saves write with, `"none"` for none; None if the layout knows no codecs."""
        arrays = self.written.arrays
        return arrays.save_format.codec if isinstance(arrays, OrbaxLayout) else None

    def with_codec(self, codec: str) -> Engine:
        """Return the engine for saves with another codec; its layout must know codecs."""
        layout = _with_codec(self.layout, codec)
        written = layout.written if isinstance(layout, AutoLayout) else layout
        pipelines = self.pipelines.for_layout(written)
        return replace(
            self,
            layout=layout,
            bucket_layouts={size: _with_codec(each, codec) for size, each in self.bucket_layouts.items()},
            pipelines=pipelines,
            saving=pipelines.local[0],
        )

    def with_progress(self, progress: ShowProgress) -> Engine:
        """Return the engine for one save or restore, which shows its progress.

        Raises:
            SpecError: If it cannot be shown in this way.
        """
        shown = shown_progress(progress)
        if shown is None:
            return self

        return replace(self, observers=(*self.observers, shown), on_progress=shown)

    def observing(self, kind: str, path: str) -> AbstractContextManager[Sequence[TellReport]]:
        """Have all observers observe one save or restore; see `observed`."""
        return observed(self.observers, kind, path, self.events) if self.observers else nullcontext(())

    @property
    def is_joint(self) -> bool:
        """True if several processes save together."""
        return len(self.coordinator.processes) > 1

    def operation(self, path: str) -> Operation:
        """Return what the processes agree by in a save to `path`.

        Raises:
            InactiveProcessError: If this process takes no part.
        """
        name = self.agreed_name(path)
        return self.coordinator.operation(name, is_local=name != path)

    def is_local(self, path: str) -> bool:
        """True if several processes save to `path`, each on its own disk or in a keeper."""
        return self.is_joint and self.config.job.local_name(path) is not None

    def agreed_name(self, path: str) -> str:
        """Return what all processes call `path`, which may be on local disks, or in keepers."""
        local = self.config.job.local_name(path)
        return path if local is None else f"on local disks: {local}"

    def counted_caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """The caches of the layouts and of runs, whose bytes count to the memory budget."""
        layouts = (self.layout, *self.bucket_layouts.values())
        written = [layout.written if isinstance(layout, AutoLayout) else layout for layout in layouts]
        own = [cache for layout in written if isinstance(layout, Caching) for cache in layout.caches]
        return (*own, *self.caches.counted)

    def save_run(
        self, request: SaveRequest, threads: Threads, handler_work: HandlerWork, *, goes_on: bool = False
    ) -> SaveRun:
        """Make the context of one save.

        Args:
            request: What was asked for.
            threads: For blocking calls.
            handler_work: Of handlers that write themselves.
            goes_on: Whether somebody takes the checkpoint on to another place, be it published or stranded.

        Raises:
            SpecError: If `custom_metadata` cannot be written as JSON, or `base` is in another store. If
                another layout than Orbax's is to be written to a bucket.
        """
        path = request.path
        base = None if request.base is None else self._base_of(path, request.base)
        operation, layout = self.operation(path), self.written
        workspace = Workspace(
            self.store,
            threads,
            path,
            layout.temporary_name(path),
            overwrite=request.overwrite,
            recognises=partial(layout.recognises, self.store),
            file=None if layout.places is None else layout.places.file_of(path),
            joins=not operation.publishes,
            # Alone, it would rather begin in the next place. Others of a job may be in the middle of it.
            may_strand="never" if not goes_on else "once begun" if operation.is_alone else "always",
        )

        return SaveRun(
            path=path,
            registry=self.registry,
            memory=self.memory,
            threads=threads,
            store=self.store,
            finder=self.layout,
            coordinator=self.coordinator,
            events=self.events,
            limits=_run_limits(self.config.save, self.memory, "save"),
            caches=self.caches,
            progress=ProgressMeter(self.on_progress),
            request=request,
            layout=layout,
            workspace=workspace,
            reading=partial(reading, self.store, threads),
            started_ns=time.time_ns(),
            custom_metadata=None if request.custom_metadata is None else _as_json(request.custom_metadata),
            base=base,
            folder="" if layout.folders is None else layout.folders.only_folder or "",
            compare_linked_every=self.config.save.compare_linked_every,
            operation=operation,
            calm=partial(calm_part, self.config.loop),
            handler_work=handler_work,
        )

    def _base_of(self, path: str, base: str | os.PathLike[str]) -> str:
        found = path_or_url(base)
        if self.stores.at(found) is not self.store:
            raise SpecError(f"base {found!r} is not in the store that {path!r} is in")

        return found

    def restore_run(self, path: str, threads: Threads, store: Store) -> RestoreRun:
        """Make the context of one restore, from `store`: the own one, or a snapshot of it."""
        return RestoreRun(
            path=path,
            registry=self.registry,
            memory=self.memory,
            threads=threads,
            store=store,
            finder=self.layout,
            coordinator=self.coordinator,
            events=self.events,
            limits=_run_limits(self.config.restore, self.memory, "restore"),
            caches=self.caches,
            progress=ProgressMeter(self.on_progress),
        )

    @asynccontextmanager
    async def view(self, path: str, threads: Threads, *, shares: bool = True) -> AsyncGenerator[Engine]:
        """Yield the engine that reads the checkpoint at `path` as its store learnt it at once, if it does.

        Args:
            path: Of the checkpoint.
            threads: For blocking calls.
            shares: Whether another process of the job may have learnt it for this one.
        """
        shared = self._shared_reads(path) if shares else None
        async with self.views.of(self.store, threads, path, shared) as store:
            yield self if store is self.store else replace(self, store=store)

    def reading(self, path: str, threads: Threads) -> AbstractAsyncContextManager[Reading]:
        """Read `path` from one of its states; see `handlers.stores.publishing.reading`."""
        shared = self._shared_reads(path)
        return reading(self.store, threads, path, views=self.views, shared=shared)

    async def read_unchanged(self, path: str, threads: Threads, read: Callable[[Reading], Awaitable[T]]) -> T:
        """Return the result of `read`, called again if what is at `path` was replaced meanwhile.

        It reads from the store of the `Reading`; see `read_unchanged` in the same module.
        """
        shared = self._shared_reads(path)
        return await read_unchanged(self.store, threads, path, read, views=self.views, shared=shared)

    def _shared_reads(self, path: str) -> SharedReads | None:
        if isinstance(self.coordinator, SharesReads) and not self.is_local(path):
            return self.coordinator.shared_reads()

        return None


def _run_limits(options: FlowOptions, memory: MemoryRegulator, flow: Flow) -> RunLimits:
    limit = memory.limit_of(flow)
    piece_bytes = piece_bytes_within(options.piece_bytes, limit)
    batch_bytes = min(options.batch_bytes, MOST_PIECES * piece_bytes)
    in_flight = memory.in_flight(flow).limit
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 0)
    sizes = piece_bytes, options.batch_leaves, batch_bytes, options.piece_bytes
    return RunLimits(*sizes, limit, in_flight, len(usable))


def make_engine(parts: CheckpointerParts) -> Engine:
    """Return what the parts of a Checkpointer are, with defaults for those that are None.

    Raises:
        ConfigError: If an option is unknown or does not fit.
        PipelineError: If stages do not fit each other.
        CoordinationError: If the processes of this job cannot agree by the service of this jax.
    """
    options, layout, coordinator = parts.config, parts.layout, parts.coordinator
    if coordinator is None:
        coordinator = coordinator_of_jax(options.processes, options.job)
    elif options.job.active_processes is not None or options.job.key_prefix:
        raise ConfigError("job", "a coordinator that is given knows which processes take part")

    stores = StoreFinder(parts.store, options.store)
    bucket_layouts: dict[int, Layout | AutoLayout] = {}
    if layout is None:
        form = options.format if parts.save_format is None else parts.save_format
        if form.replica_parallel is None:
            shares_disk = options.job.local_root is None
            form = replace(form, replica_parallel=len(coordinator.processes) > 1 and shares_disk)

        coded_chunk = min(CODED_CHUNK, parts.memory.limit // 4)
        layout = AutoLayout(OrbaxLayout(form, coded_chunk))
        bucket_layouts = {
            file_bytes: AutoLayout(OrbaxLayout(form, coded_chunk, plain_chunk=file_bytes))
            for file_bytes in {options.store.of_scheme(scheme).file_bytes for scheme in SCHEMES.own}
        }

    written = layout.written if isinstance(layout, AutoLayout) else layout
    pipelines = FittedPipelines(parts, written, joint=len(coordinator.processes) > 1)
    events = get_logger()
    keeper = ReportKeeper(
        options.telemetry.keep_reports,
        parts.memory,
        stores.at,
        events,
        writes=coordinator.is_primary,  # one for the whole job
    )
    return Engine(
        options,
        parts.memory,
        default_handlers() if parts.registry is None else parts.registry,
        stores.default,
        layout,
        coordinator,
        events,
        stores,
        bucket_layouts,
        keeper,
        pipelines,
        *pipelines.local,
        observers=(*parts.observers, *observers_of(options.telemetry), keeper),
    )


def _with_codec(layout: Layout | AutoLayout, codec: str) -> Layout | AutoLayout:
    if isinstance(layout, AutoLayout):
        return replace(layout, written=cast("Layout", _with_codec(layout.written, codec)))

    assert isinstance(layout, OrbaxLayout), "others know no codecs"
    return layout.with_codec(codec)


def needed_besides(options: Config) -> NeededModules:
    """Return the modules that only some need: of several processes, and of configured observers."""
    together = NEEDED_TOGETHER if processes_of_jax()[1] > 1 else {}
    return {**together, **modules_of_observers(options.telemetry)}


def coordinator_of_jax(limits: JobLimits, chosen: JobOptions) -> Coordinator:
    """Return how the processes that `jax.distributed` has joined agree; one alone need not.

    Raises:
        ConfigError: If a process was chosen that there is not.
    """
    index, count = processes_of_jax()
    if count == 1:
        if chosen.active_processes not in (None, (0,)):
            problem = f"are {list(chosen.active_processes or ())}, and this job has process 0 alone"
            raise ConfigError("job.active_processes", f"{problem}: call jax.distributed.initialize() first")

        return SingleProcessCoordinator()

    # Here, because one process needs nothing of it.
    from penstock.handlers.coordinators.jax_key_values import JaxKeyValues
    from penstock.handlers.coordinators.job_coordinator import JobCoordinator

    return JobCoordinator(JaxKeyValues(), index, count, limits, chosen)


def _as_json(custom_metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy, as a reader will get it. The caller may then change the original."""
    if not isinstance(cast("object", custom_metadata), Mapping):
        raise SpecError(f"custom_metadata must be a mapping, not {custom_metadata!r}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(custom_metadata)))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"custom_metadata cannot be written as JSON: {error}") from error

    return copied


def processes_of_jax() -> tuple[int, int]:
    """Return which process this is, and how many `jax.distributed` has joined: 0 and 1 without it."""
    # Here, and not with jax's service, since a process alone asks it, too, and loads nothing of that.
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(state, "client", None) is None:
        return 0, 1

    return int(state.process_id), int(state.num_processes)
