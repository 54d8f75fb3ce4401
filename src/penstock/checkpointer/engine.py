"""The parts of a Checkpointer, and what each save or restore gets from them."""

from __future__ import annotations

__all__ = ("Compare", "Engine", "make_engine", "needed_together")

import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, cast, final

from structlog.stdlib import BoundLogger

from penstock.handlers.coordinators.jax_processes import processes_of_jax
from penstock.handlers.formats.auto_layout import AutoLayout
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.orbax.writing.storage_choice import CODED_CHUNK
from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.imports import Homes
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.config.config import Config, FlowOptions
from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import PenstockError, SpecError, StorageError
from penstock.kernel.events import get_logger
from penstock.kernel.memory.bounded_cache import BoundedCache, Caching
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.pipeline.run_context import RestoreRun, RunLimits, SaveRun
from penstock.kernel.pipeline.shared_objects import Shared
from penstock.kernel.protocols.coordinator import Coordinator, SingleProcessCoordinator
from penstock.kernel.protocols.layouts import ArrangedLayout, ItemsLayout, Layout
from penstock.kernel.protocols.leaf_handlers import HandlerLookup
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.holds import hold_for_reading
from penstock.kernel.storage.paths import absolute_path
from penstock.kernel.storage.workspace import Workspace

if TYPE_CHECKING:
    from penstock.kernel.storage.joined_workspace import JoinedWorkspace

T = TypeVar("T")
Compare: TypeAlias = Literal["identity", "digest"]
"""How an unchanged leaf is recognised."""


LEAST_PIECE: Final = 2**20
MOST_PIECES: Final = 256
"""Pieces per message: planning this many takes the event loop about a millisecond."""

MOST_READS: Final = 10
"""How many times a checkpoint is read again because it was overwritten during the read."""


NEEDED_TOGETHER: Final[Homes] = {
    "penstock.handlers.coordinators.jax_key_values": "JaxKeyValues",
    "penstock.handlers.leaves.jax_arrays.process_shards": "parts_here",
    "penstock.kernel.coordination.job_coordinator": "JobCoordinator",
    "penstock.kernel.storage.joined_workspace": "JoinedWorkspace",
    "penstock.stages.agree": "Agree",
    "penstock.stages.joint.balancing": "balanced",
    "penstock.stages.joint.division": "divided",
    "penstock.stages.joint.joint_commit": "JointCommitter",
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
    shared: Shared = field(default_factory=Shared)

    @property
    def is_joint(self) -> bool:
        """Whether several processes save together."""
        return self.coordinator.process_count > 1

    def caches(self) -> Callable[[], Sequence[BoundedCache[Any, Any]]]:
        """Return what tells the caches of the layout and of the shared objects that there are by then."""
        layout, shared = self.layout, self.shared
        own = layout.caches if isinstance(layout, Caching) else ()
        return lambda: [*own, *shared.caches]

    def save_run(
        self,
        path: str,
        threads: Threads,
        *,
        overwrite: bool,
        custom_metadata: Mapping[str, Any] | None,
        save_args: object,
        base: str | os.PathLike[str] | None,
        compare: Compare,
    ) -> SaveRun:
        """Make the context of one save; the arguments are those of `Checkpointer.save`.

        Raises:
            SpecError: If `custom_metadata` cannot be written as JSON, or there is no such `compare`.
        """
        if compare not in ("identity", "digest"):
            raise SpecError(f"compare must be 'identity' or 'digest', not {compare!r}")

        operation = self.coordinator.operation(path)
        workspace: Workspace | JoinedWorkspace
        if operation is not None and not operation.is_primary:
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
            base=None if base is None else absolute_path(base),
            folder=(self.layout.only_folder or "") if isinstance(self.layout, ItemsLayout) else "",
            save_args=save_args,
            by_digest=compare == "digest",
            started_ns=time.time_ns(),
            custom_metadata=_as_json(custom_metadata),
        )

    def restore_run(self, path: str, threads: Threads) -> RestoreRun:
        """Make the context of one restore."""
        return RestoreRun(**self._shared(path, threads, self.config.restore, self.memory.limit))

    async def read_unchanged(self, path: str, threads: Threads, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `read()`, repeating it if the checkpoint at `path` was replaced meanwhile.

        So no result mixes two checkpoints. While it reads, no penstock on this machine deletes the step
        at `path`.

        Raises:
            StorageError: If it was replaced at every attempt.
        """
        async with hold_for_reading(self.store, threads, path):
            return await self._read_unchanged(path, threads, read)

    async def _read_unchanged(self, path: str, threads: Threads, read: Callable[[], Awaitable[T]]) -> T:
        for _ in range(MOST_READS):
            before = await threads.run(self.store.identity, path)
            try:
                found = await read()
            except PenstockError:
                if before == await threads.run(self.store.identity, path):
                    raise
            else:
                if before == await threads.run(self.store.identity, path):
                    return found

                del found  # before the next one is read

            self.events.warning("restore.overtaken", path=path)

        raise StorageError("read", path, f"was replaced {MOST_READS} times while it was being read")

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
        coordinator = _coordinator_of_jax(options.processes)
    if layout is None:
        form = options.format if save_format is None else save_format
        if form.replica_parallel is None:
            form = replace(form, replica_parallel=coordinator.process_count > 1)

        layout = AutoLayout(OrbaxLayout(form, min(CODED_CHUNK, regulator.limit // 4)))

    return Engine(
        options,
        regulator,
        default_handlers() if registry is None else registry,
        LocalStore(io=options.store.io, links=options.store.links) if store is None else store,
        layout,
        coordinator,
        get_logger(),
    )


def needed_together() -> Homes:
    """Return the modules that only a job of several processes needs; none for one."""
    return NEEDED_TOGETHER if processes_of_jax()[1] > 1 else {}


def _coordinator_of_jax(limits: JobLimits) -> Coordinator:
    """Return how the processes that `jax.distributed` has joined agree; one alone need not."""
    index, count = processes_of_jax()
    if count == 1:
        return SingleProcessCoordinator()

    # Here, because one process needs nothing of it.
    from penstock.handlers.coordinators.jax_key_values import JaxKeyValues
    from penstock.kernel.coordination.job_coordinator import JobCoordinator

    return JobCoordinator(JaxKeyValues(), index, count, limits)


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
