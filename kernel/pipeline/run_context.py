"""The context that a stage may use while it runs: one `SaveRun` or `RestoreRun` for each save or restore."""

from __future__ import annotations

__all__ = (
    "BUDGET_PIECES",
    "LEAST_PIECE",
    "BaseIfWhole",
    "Compare",
    "HandlerWork",
    "Progress",
    "ProgressMeter",
    "RestoreRun",
    "Run",
    "RunCaches",
    "RunLimits",
    "SaveRequest",
    "SaveRun",
    "ShowProgress",
    "Staging",
    "piece_bytes_within",
)

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, final

from anyio import create_task_group, move_on_after

from penstock.kernel.errors import SpecError
from penstock.kernel.memory.bounded_cache import BoundedCache
from penstock.kernel.protocols.build_place import Overwrite
from penstock.kernel.protocols.coordinator import SoleOperation

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.memory.byte_account import ByteLease
    from penstock.kernel.memory.regulator import Flow, MemoryRegulator
    from penstock.kernel.pipeline.pipeline import Pipeline
    from penstock.kernel.protocols.build_place import BuildPlace, StateRead
    from penstock.kernel.protocols.coordinator import Coordinator, Operation
    from penstock.kernel.protocols.layouts import CheckpointFinder, Layout
    from penstock.kernel.protocols.leaf import LeafPredicate
    from penstock.kernel.protocols.leaf_handlers import Background, HandlerLookup
    from penstock.kernel.protocols.stores import Store


@final
@dataclass(frozen=True, slots=True)
class BaseIfWhole(os.PathLike[str]):
    """The path of a base. One that is gone or damaged links nothing, and is no error.

    The processes of a job need not agree about it: each links what it finds.
    """

    path: str

    def __fspath__(self) -> str:
        return self.path


Compare: TypeAlias = Literal["identity", "digest"]
"""The way in which an unchanged leaf is recognised."""

Staging: TypeAlias = Literal["copy", "overlap"]

ShowProgress: TypeAlias = bool | Literal["rich", "tqdm"] | Callable[[int, int], object]
"""True for a bar of what is installed, the name of the library that draws it, or a function that is called
with the bytes done and all bytes, in the thread of the event loop."""


@final
@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The options of a save, as one value. `Checkpointer.save` describes each of them.

    The tree is not among them: it travels in a `TreeToSave`, which lets go of it.
    """

    path: str  #: absolute
    overwrite: Overwrite = False
    prioritise: LeafPredicate | None = None
    staging: Staging = "copy"
    custom_metadata: Mapping[str, Any] | None = None
    pipeline: Pipeline[SaveRun] | None = None
    save_args: object = None  #: a `SaveArgs`, a tree prefix of them, or a function
    base: str | os.PathLike[str] | None = None  #: an earlier checkpoint, whose files may be shared
    compare: Compare = "identity"
    progress: ShowProgress = False

    @property
    def by_digest(self) -> bool:
        """True if leaves are compared by their bytes, and not by identity."""
        return self.compare == "digest"

    @property
    def base_if_whole(self) -> bool:
        """True if a base that is gone or damaged is passed over."""
        return isinstance(self.base, BaseIfWhole)

    def check(self) -> None:
        """Raise `SpecError` if an option does not fit."""
        # Not on construction: the other processes of a job must hear of a request that is refused.
        allowed: dict[str, tuple[object, ...]] = {
            "overwrite": (False, True, "delete-first"),
            "staging": ("copy", "overlap"),
            "compare": ("identity", "digest"),
        }
        for name, values in allowed.items():
            given = getattr(self, name)
            if given not in values:
                *others, last = map(repr, values)
                raise SpecError(f"{name} must be {', '.join(others)} or {last}, not {given!r}")


@final
@dataclass(frozen=True, slots=True)
class RunCaches:
    """The memory of one Checkpointer: what a save or a restore keeps for the next ones. Thread-safe.

    Stages keep no state. Each cache has one reader, which says what is in it.
    """

    structures: BoundedCache[Any, Any] = field(default_factory=partial(BoundedCache[Any, Any], 8))
    node_types: BoundedCache[Any, Any] = field(default_factory=partial(BoundedCache[Any, Any], 8))
    saved_trees: BoundedCache[Any, Any] = field(default_factory=partial(BoundedCache[Any, Any], 4))
    joined_trees: BoundedCache[Any, Any] = field(default_factory=partial(BoundedCache[Any, Any], 4))
    known_values: BoundedCache[str, Any] = field(default_factory=partial(BoundedCache[str, Any], 4))
    linking_saves: Iterator[int] = field(default_factory=count)  #: counts the saves that link
    salt: int = field(default_factory=partial(secrets.randbits, 32))  #: another one in each process

    @property
    def counted(self) -> Sequence[BoundedCache[Any, Any]]:
        """The caches whose bytes count to the memory budget, which empties them when it is short."""
        # Not `known_values`: without them a save would write again what its base has.
        return (self.structures, self.node_types, self.saved_trees, self.joined_trees)


@final
class HandlerWork:
    """The work that third-party handlers do by themselves in one save: it cannot be ended.

    Args:
        undo_s: For how long a save that failed or was cancelled waits for it.
        on_hang: Called with a handler's coroutine that has not ended by then.
    """

    __slots__ = ("_begun", "_on_hang", "_undo_s")

    def __init__(self, undo_s: float = 60.0, on_hang: Callable[[Background], object] | None = None) -> None:
        self._begun: list[Background] = []
        self._on_hang = on_hang
        self._undo_s = undo_s

    @property
    def begun(self) -> Sequence[Background]:
        """All of it, over or not."""
        return self._begun

    def add(self, work: Background) -> None:
        """Note work that has begun. It is waited for before the workspace is discarded."""
        self._begun.append(work)

    def let_go(self) -> None:
        """Report no hang any more."""
        self._on_hang = None

    async def wait_for_coroutine(self, coroutine: Background) -> None:
        """Wait until it ends, and report it if that takes too long. To be shielded from a cancellation."""
        with move_on_after(self._undo_s, shield=True) as waiting:
            await coroutine.wait()

        if waiting.cancelled_caught and self._on_hang is not None:
            self._on_hang(coroutine)

    async def wait_over(self) -> Background | None:
        """Wait until none goes on, but not too long; return one that does."""
        left = {id(work): work for work in self._begun}

        async def wait(number: int, work: Background) -> None:
            with suppress(Exception):  # the failure's cause is known already
                await work.wait()

            del left[number]

        with move_on_after(self._undo_s):
            async with create_task_group() as waits:
                for number, work in list(left.items()):
                    waits.start_soon(wait, number, work)

        return next(iter(left.values()), None)

    def call_when_over(self, then: Callable[[], object]) -> None:
        """Call `then` once, in any thread, when no work goes on any more."""
        lasting = [work.when_over for work in self._begun if work.when_over is not None]
        left, lock = len(lasting), threading.Lock()

        def one_is_over() -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                then()

        for when_over in lasting:
            when_over(one_is_over)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a save or a restore; totals are 0 until it is planned."""

    leaves_done: int
    leaves_total: int
    bytes_done: int
    bytes_total: int


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


LEAST_PIECE: Final = 2**20
"""A smaller piece costs more than its bytes."""


BUDGET_PIECES: Final = 16
"""So many pieces fit a budget, unless they would be smaller than the least."""


def piece_bytes_within(chosen_bytes: int, budget_bytes: int) -> int:
    """Return how large pieces are under a memory budget: at most as large as chosen.

    Several should fit even a small budget, and the allocator keeps little of small ones.
    """
    return min(chosen_bytes, max(budget_bytes // BUDGET_PIECES, LEAST_PIECE), budget_bytes)


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The size of messages, in one place since several stages must agree on it, and what it follows from."""

    piece_bytes: int  #: a leaf's bytes travel in pieces of at most about this many
    batch_leaves: int  #: small leaves travel together, at most this many
    batch_bytes: int  #: and at most this many bytes
    chosen_piece_bytes: int = 0  #: those of the option; a small budget makes pieces smaller. 0: unknown
    budget_bytes: int = 0  #: of memory, when the run began; 0: unknown
    in_flight_bytes: int = 0  #: that may be on their way to or from storage at once; 0: unknown
    processors: int = 0  #: that the process may use; 0: unknown


@dataclass(slots=True, kw_only=True)
class Run:
    """The context that every stage may use."""

    path: str  #: absolute
    registry: HandlerLookup
    memory: MemoryRegulator
    threads: Threads
    store: Store
    finder: CheckpointFinder  #: of what is stored
    coordinator: Coordinator
    events: BoundLogger
    limits: RunLimits
    flow: ClassVar[Flow]
    caches: RunCaches = field(default_factory=RunCaches)
    progress: ProgressMeter = field(default_factory=ProgressMeter)

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
    request: SaveRequest
    layout: Layout  #: that the save writes with
    workspace: BuildPlace
    reading: Callable[[str], AbstractAsyncContextManager[StateRead]]  #: holds a base, compares at the end
    started_ns: int  #: wall clock, nanoseconds since the epoch
    custom_metadata: Mapping[str, Any] | None = None  #: that of the request, as a reader will get it
    base: str | None = None  #: that of the request, absolute
    folder: str = ""  #: the tree's directory in the checkpoint, if there is only one
    compare_linked_every: int = 10  #: in so many saves in a row, what is linked is read once; 0: never
    operation: Operation = field(default_factory=SoleOperation)  #: what the processes of a job agree by
    calm: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """For work that makes many objects: meanwhile no long collection of garbage stops the event loop."""
    handler_work: HandlerWork = field(default_factory=HandlerWork)

    @property
    def own_folder(self) -> str:
        """The folder of this process's data files, in the directory of a tree; one process alone has none."""
        arrays = self.layout.arrays
        if arrays is None or self.operation.is_alone:  # nothing to tell apart on disk
            return ""

        return arrays.process_folder(self.operation.process_index)

    def let_go(self) -> None:
        """Forget what the caller gave, when the save is over. A traceback may keep this object."""
        self.request = SaveRequest(self.path)
        self.progress = ProgressMeter()
        self.handler_work.let_go()


@final
@dataclass(slots=True, kw_only=True)
class RestoreRun(Run):
    """The context of the stages of a restore."""

    flow: ClassVar[Flow] = "restore"
