"""The context that a stage may use while it runs: one `SaveRun` or `RestoreRun` for each save or restore."""

from __future__ import annotations

__all__ = (
    "ProgressMeter",
    "RestoreRun",
    "Run",
    "RunLimits",
    "SaveRun",
)

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, final

from penstock.kernel.config.config import LoopOptions
from penstock.kernel.pipeline.futures import Progress
from penstock.kernel.pipeline.shared_objects import Shared

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.memory.byte_account import ByteLease
    from penstock.kernel.memory.regulator import Flow, MemoryRegulator
    from penstock.kernel.pipeline.observers import Observer
    from penstock.kernel.protocols.coordinator import Coordinator, Operation
    from penstock.kernel.protocols.files_handler import Background
    from penstock.kernel.protocols.layouts import Layout
    from penstock.kernel.protocols.leaf_handlers import HandlerLookup
    from penstock.kernel.protocols.stores import Store
    from penstock.kernel.storage.joined_workspace import JoinedWorkspace
    from penstock.kernel.storage.workspace import Workspace


@final
class ProgressMeter:
    """Counts leaves and bytes. Written in the event loop, read from any thread.

    Args:
        listener: Called with the bytes done and all bytes whenever they change. It must not raise or block.
    """

    __slots__ = ("_listener", "bytes_done", "bytes_total", "leaves_done", "leaves_total")

    def __init__(self, listener: Callable[[int, int], object] | None = None) -> None:
        self._listener = listener
        self.leaves_done = self.leaves_total = self.bytes_done = self.bytes_total = 0

    def plan(self, leaves: int, nbytes: int) -> None:
        """Set the totals."""
        self.leaves_total, self.bytes_total = leaves, nbytes
        if self._listener is not None:
            self._listener(self.bytes_done, nbytes)

    def advance(self, leaves: int, nbytes: int) -> None:
        """Count work done."""
        self.leaves_done += leaves
        self.bytes_done += nbytes
        if self._listener is not None:
            self._listener(self.bytes_done, self.bytes_total)

    def snapshot(self) -> Progress:
        """Return the figures as they are now."""
        return Progress(self.leaves_done, self.leaves_total, self.bytes_done, self.bytes_total)


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The size of messages, in one place because several stages must agree on it."""

    piece_bytes: int  #: a leaf's bytes travel in pieces of at most about this many
    batch_leaves: int  #: small leaves travel together, at most this many
    batch_bytes: int  #: and at most this many bytes


@dataclass(slots=True, kw_only=True)
class Run:
    """The context that every stage may use."""

    path: str  #: absolute
    registry: HandlerLookup
    memory: MemoryRegulator
    threads: Threads
    store: Store
    layout: Layout
    coordinator: Coordinator
    events: BoundLogger
    limits: RunLimits
    flow: ClassVar[Flow]
    shared: Shared = field(default_factory=Shared)
    progress: ProgressMeter = field(default_factory=ProgressMeter)
    observers: tuple[Observer, ...] = ()

    @property
    def process(self) -> tuple[int, int]:
        """The number of this process among those that take part, and their count; else 0 and 1."""
        index, processes = self.coordinator.process_index, self.coordinator.processes
        return (processes.index(index), len(processes)) if index in processes else (0, 1)

    async def lease(
        self,
        nbytes: int,
        key_path: str,
        *,
        prioritised: bool,
        about: Mapping[str, object] = MappingProxyType({}),
    ) -> ByteLease:
        """Wait for `nbytes` of the shared budget; more than all of it is admitted alone, with a warning.

        Args:
            nbytes: Host bytes.
            key_path: The first leaf that they are for.
            prioritised: Wait before those that are not.
            about: Further fields for that warning.

        Cancellation:
            As `MemoryRegulator.acquire`.
        """
        if nbytes > self.memory.limit_of(self.flow):
            self.events.warning("memory.oversize", key_path=key_path, nbytes=nbytes, **about)

        return await self.memory.acquire(nbytes, prioritised=prioritised, admit_oversize=True, flow=self.flow)


@final
@dataclass(slots=True, kw_only=True)
class SaveRun(Run):
    """The context of the stages of a save."""

    flow: ClassVar[Flow] = "save"
    workspace: Workspace | JoinedWorkspace
    started_ns: int  #: wall clock, nanoseconds since the epoch
    custom_metadata: Mapping[str, Any] | None = None
    base: str | None = None  #: an earlier checkpoint, whose files may be shared
    base_if_whole: bool = False  #: whether a base that is gone or damaged is passed over
    folder: str = ""  #: the tree's directory in the checkpoint, if there is only one
    compare_linked_every: int = 10  #: in so many saves in a row, what is linked is read once; 0: never
    by_digest: bool = False  #: whether leaves are compared by their bytes, and not by identity
    operation: Operation | None = None  #: what the processes of a job agree by, if there are several
    save_args: object = None  #: how leaves are stored: a `SaveArgs`, a tree prefix of them, or a function
    keep_reports: int = 0  #: how many reports are kept beside the checkpoints
    loop: LoopOptions = field(default_factory=LoopOptions)  #: what becomes of the interpreter's settings
    background: list[Background] = field(default_factory=list["Background"])
    """Background work of third-party handlers; waited for before the workspace is discarded."""
    undo_s: float = 60.0  #: how long third-party work may take to end
    on_hang: Callable[[Background], object] | None = None
    """Called if third-party work has not ended by then."""

    def let_go(self) -> None:
        """Forget what the caller gave, when the save is over. A traceback may keep this object."""
        self.save_args = self.on_hang = None
        self.observers = ()
        self.progress = ProgressMeter()


@final
@dataclass(slots=True, kw_only=True)
class RestoreRun(Run):
    """The context of the stages of a restore."""

    flow: ClassVar[Flow] = "restore"
