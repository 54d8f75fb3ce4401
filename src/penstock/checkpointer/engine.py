"""The parts of a Checkpointer, and what each save or restore gets from them."""

from __future__ import annotations

__all__ = ("Compare", "Engine", "make_engine", "needed_besides")

import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, cast, final

from structlog.stdlib import BoundLogger

from penstock.handlers.coordinators.jax_processes import processes_of_jax
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.orbax.storage_choice import CODED_CHUNK
from penstock.handlers.layouts.auto_layout import AutoLayout
from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.kernel.concurrency.imports import Homes
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.config.config import Config, FlowOptions
from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.config.job_options import JobOptions
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import (
    ConfigError,
    SpecError,
)
from penstock.kernel.events import get_logger
from penstock.kernel.memory.bounded_cache import BoundedCache, Caching
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.pipeline.observers import Observer
from penstock.kernel.pipeline.run_context import ProgressMeter, RestoreRun, RunLimits, SaveRun
from penstock.kernel.pipeline.shared_objects import Shared
from penstock.kernel.protocols.coordinator import (
    Coordinator,
    Operation,
    SharedReads,
    SharesReads,
    SingleProcessCoordinator,
)
from penstock.kernel.protocols.layouts import ArrangedLayout, ItemsLayout, Layout
from penstock.kernel.protocols.leaf_handlers import HandlerLookup
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.optional_base import BaseIfWhole
from penstock.kernel.storage.paths import BUCKETS, bucket_of, path_or_url
from penstock.kernel.storage.reading import Reading, read_unchanged, reading
from penstock.kernel.storage.snapshots import Views
from penstock.kernel.storage.workspace import Overwrite, Workspace
from penstock.progress.shown_progress import ShowProgress, shown_progress
from penstock.stores.store_finder import StoreFinder
from penstock.telemetry.find_observers import homes_of_observers

if TYPE_CHECKING:
    from penstock.kernel.storage.joined_workspace import JoinedWorkspace

T = TypeVar("T")
Compare: TypeAlias = Literal["identity", "digest"]
"""How an unchanged leaf is recognised."""


LEAST_PIECE: Final = 2**20
MOST_PIECES: Final = 256
"""Pieces per message: planning this many takes the event loop about a millisecond."""


NEEDED_TOGETHER: Final[Homes] = {
    "penstock.handlers.coordinators.jax_key_values": "JaxKeyValues",
    "penstock.handlers.leaves.shards": "parts_here",
    "penstock.handlers.leaves.single_replica": "broadcast_together",
    "penstock.handlers.coordinators.recorded_answers": "AnsweredStore",
    "penstock.kernel.coordination.job_coordinator": "JobCoordinator",
    "penstock.kernel.storage.joined_workspace": "JoinedWorkspace",
    "penstock.stages.agree": "Agree",
    "penstock.stages.joint.active_processes": "check_active",
    "penstock.stages.joint.balancing": "balanced",
    "penstock.stages.joint.division": "divided",
    "penstock.stages.joint.joint_commit": "JointCommitter",
    "penstock.stages.locate_once": "LocateOnce",
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
    layout: Layout
    coordinator: Coordinator
    events: BoundLogger
    stores: StoreFinder
    bucket_layouts: Mapping[int, Layout]
    """Of what is saved to buckets, by the length of a data file: large arrays are cut to that size. A layout
    that the caller gave is used as it is, and not among them."""
    shared: Shared = field(default_factory=Shared)
    observers: tuple[Observer, ...] = ()  #: told of every save and restore
    on_progress: Callable[[int, int], object] | None = None  #: called with the bytes done and all bytes

    def at(self, path: str) -> Engine:
        """Return the engine for what lies at an absolute path or a URL: with the store that it lies in."""
        store = self.stores.at(path)
        bucket = bucket_of(path)
        if store is self.store or bucket is None:
            return self

        file_bytes = self.config.store.of_scheme(bucket[0]).file_bytes
        return replace(self, store=store, layout=self.bucket_layouts.get(file_bytes, self.layout))

    def showing(self, progress: ShowProgress) -> Engine:
        """Return the engine for one save or restore, which shows its progress.

        Raises:
            SpecError: If it cannot be shown in this way.
        """
        shown = shown_progress(progress)
        if shown is None:
            return self

        return replace(self, observers=(*self.observers, shown), on_progress=shown)

    @property
    def is_joint(self) -> bool:
        """True if several processes save together."""
        return len(self.coordinator.processes) > 1

    def operation(self, path: str) -> Operation | None:
        """Return what the processes agree by in a save to `path`; None if there is one process.

        Raises:
            InactiveProcessError: If this process takes no part.
        """
        return self.coordinator.operation(self.agreed_name(path), is_local=self.is_local(path))

    def is_local(self, path: str) -> bool:
        """True if several processes save to `path`, each on a disk of its own."""
        return self.is_joint and self.config.job.local_name(path) is not None

    def agreed_name(self, path: str) -> str:
        """Return what all processes call `path`, which may be on local disks."""
        local = self.config.job.local_name(path)
        return path if local is None else f"on local disks: {local}"

    def caches(self) -> Callable[[], Sequence[BoundedCache[Any, Any]]]:
        """Return what tells the caches of the layout and of the shared objects that there are by then."""
        shared = self.shared
        layouts = (self.layout, *self.bucket_layouts.values())
        own = [cache for layout in layouts if isinstance(layout, Caching) for cache in layout.caches]
        return lambda: [*own, *shared.caches]

    def save_run(
        self,
        path: str,
        threads: Threads,
        *,
        overwrite: Overwrite,
        custom_metadata: Mapping[str, Any] | None,
        save_args: object,
        base: str | os.PathLike[str] | None,
        compare: Compare,
    ) -> SaveRun:
        """Make the context of one save; the arguments are those of `Checkpointer.save`.

        Raises:
            SpecError: If `custom_metadata` cannot be written as JSON, or there is no such `compare` or
                `overwrite`. If `base` lies in another store. If another layout than Orbax's is
                to be written to a bucket.
        """
        if compare not in ("identity", "digest"):
            raise SpecError(f"compare must be 'identity' or 'digest', not {compare!r}")

        if overwrite not in (False, True, "delete-first"):
            raise SpecError(f"overwrite must be True, False or 'delete-first', not {overwrite!r}")

        held = None if base is None else self._base_of(path, base)
        operation = self.operation(path)
        workspace: Workspace | JoinedWorkspace
        if operation is not None and not (operation.is_primary or operation.is_local):
            from penstock.kernel.storage.joined_workspace import JoinedWorkspace

            workspace = JoinedWorkspace(self.store, threads, path)
        else:
            workspace = Workspace(
                self.store,
                threads,
                path,
                self.layout.temporary_name(path),
                overwrite=overwrite,
                recognises=partial(self.layout.recognises, self.store),
                file=self.layout.file_of(path) if isinstance(self.layout, ArrangedLayout) else None,
            )

        return SaveRun(
            **self._shared(path, threads, self.config.save, self.memory.limit_of("save")),
            workspace=workspace,
            operation=operation,
            base=held,
            base_if_whole=isinstance(base, BaseIfWhole),
            folder=(self.layout.only_folder or "") if isinstance(self.layout, ItemsLayout) else "",
            save_args=save_args,
            compare_linked_every=self.config.save.compare_linked_every,
            by_digest=compare == "digest",
            keep_reports=self.config.telemetry.keep_reports,
            loop=self.config.loop,
            started_ns=time.time_ns(),
            custom_metadata=_as_json(custom_metadata),
        )

    def _base_of(self, path: str, base: str | os.PathLike[str]) -> str:
        found = path_or_url(base)
        if self.stores.at(found) is not self.store:
            raise SpecError(f"base {found!r} is not in the store that {path!r} is in")

        return found

    def restore_run(self, path: str, threads: Threads) -> RestoreRun:
        """Make the context of one restore."""
        return RestoreRun(**self._shared(path, threads, self.config.restore, self.memory.limit))

    @asynccontextmanager
    async def view(self, path: str, threads: Threads, *, shares: bool = True) -> AsyncGenerator[Engine]:
        """Yield the engine that reads the checkpoint at `path` as its store learnt it at once, if it does.

        Args:
            path: Of the checkpoint.
            threads: For blocking calls.
            shares: Whether another process of the job may have learnt it for this one.
        """
        shared = self._shared_reads(path) if shares else None
        async with self.shared.of(Views).of(self.store, threads, path, shared) as store:
            yield self.with_store(store)

    def with_store(self, store: Store) -> Engine:
        """Return the engine that reads from `store`: the own one, or a snapshot of it."""
        return self if store is self.store else replace(self, store=store)

    def reading(self, path: str, threads: Threads) -> AbstractAsyncContextManager[Reading]:
        """Read what is at `path` from one state of it; see `penstock.kernel.storage.reading.reading`."""
        views, shared = self.shared.of(Views), self._shared_reads(path)
        return reading(self.store, threads, path, views=views, shared=shared)

    async def read_unchanged(self, path: str, threads: Threads, read: Callable[[Reading], Awaitable[T]]) -> T:
        """Return the result of `read`, called again if what is at `path` was replaced meanwhile.

        It reads from the store of the `Reading`; see `penstock.kernel.storage.reading.read_unchanged`.
        """
        views, shared = self.shared.of(Views), self._shared_reads(path)
        return await read_unchanged(self.store, threads, path, read, views=views, shared=shared)

    def _shared_reads(self, path: str) -> SharedReads | None:
        if isinstance(self.coordinator, SharesReads) and not self.is_local(path):
            return self.coordinator.shared_reads()

        return None

    def _shared(self, path: str, threads: Threads, options: FlowOptions, limit: int) -> dict[str, Any]:
        # Several pieces should fit even a small budget, and the allocator keeps little of small ones.
        # Below 1 MiB a piece costs more than its bytes.
        piece_bytes = min(options.piece_bytes, max(limit // 16, LEAST_PIECE), limit)
        return {
            "path": path,
            "registry": self.registry,
            "memory": self.memory,
            "threads": threads,
            "store": self.store,
            "layout": self.layout,
            "coordinator": self.coordinator,
            "events": self.events,
            "shared": self.shared,
            "observers": self.observers,
            "progress": ProgressMeter(self.on_progress),
            "limits": RunLimits(
                piece_bytes, options.batch_leaves, min(options.batch_bytes, MOST_PIECES * piece_bytes)
            ),
        }


def make_engine(
    options: Config,
    regulator: MemoryRegulator,
    registry: HandlerLookup | None,
    store: Store | None,
    save_format: SaveFormat | None,
    layout: Layout | None,
    coordinator: Coordinator | None,
) -> Engine:
    """Return the parts of a Checkpointer: those given, and defaults for None.

    Raises:
        ConfigError: If an option is unknown or does not fit.
        CoordinationError: If the processes of this job cannot agree by the service of this jax.
    """
    if coordinator is None:
        coordinator = _coordinator_of_jax(options.processes, options.job)
    elif options.job.active_processes is not None or options.job.key_prefix:
        raise ConfigError("job", "a coordinator that is given knows which processes take part")

    stores = StoreFinder(store, options.store)
    bucket_layouts: dict[int, Layout] = {}
    if layout is None:
        form = options.format if save_format is None else save_format
        if form.replica_parallel is None:
            shares_disk = options.job.local_root is None
            form = replace(form, replica_parallel=len(coordinator.processes) > 1 and shares_disk)

        coded_chunk = min(CODED_CHUNK, regulator.limit // 4)
        layout = AutoLayout(OrbaxLayout(form, coded_chunk))
        bucket_layouts = {
            file_bytes: AutoLayout(OrbaxLayout(form, coded_chunk, plain_chunk=file_bytes))
            for file_bytes in {options.store.of_scheme(scheme).file_bytes for scheme in BUCKETS}
        }

    return Engine(
        options,
        regulator,
        default_handlers() if registry is None else registry,
        stores.default,
        layout,
        coordinator,
        get_logger(),
        stores,
        bucket_layouts,
    )


def needed_besides(options: Config) -> Homes:
    """Return the modules that not everybody needs: a job of several processes, and who is told of saves."""
    together = NEEDED_TOGETHER if processes_of_jax()[1] > 1 else {}
    return {**together, **homes_of_observers(options.telemetry)}


def _coordinator_of_jax(limits: JobLimits, chosen: JobOptions) -> Coordinator:
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
    from penstock.kernel.coordination.job_coordinator import JobCoordinator

    return JobCoordinator(JaxKeyValues(), index, count, limits, chosen)


def _as_json(custom_metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a copy, as a reader will get it. The caller may then change the original."""
    if custom_metadata is None:
        return None
    if not isinstance(cast("object", custom_metadata), Mapping):
        raise SpecError(f"custom_metadata must be a mapping, not {custom_metadata!r}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(custom_metadata)))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"custom_metadata cannot be written as JSON: {error}") from error

    return copied
