"""Two interpreter settings that penstock changes while it works, to keep the event loop responsive.

They belong to the whole process, so each change is reference-counted, limited in time and undone, and can be
switched off:

* **The cyclic collector.** A save or restore of thousands of leaves makes enough small objects to set
  off full collections, each of which walks everything that jax and the application ever made: 130 ms
  here, with every thread stopped. Meanwhile only young collections run, each after `NET_ALLOCATIONS`
  container objects instead of 700: a few milliseconds long, however many leaves there are. What outlives one
  counts as old in the end, or the next collection would walk all of it. It is a threshold and no
  `gc.disable`, so other code can still disable, enable or run the collector.
* **The switch interval.** A thread that needs the interpreter waits 5 ms for a computing thread to yield,
  and two computing threads may hand it to each other first. With 1 ms the event loop waits less.

Both return to what they were when the last operation has ended, or `MOST_S` after it began, whichever
comes first (later while objects are still made by the ten thousand); unless other code has set them in
between: then that value stays.
"""

from __future__ import annotations

__all__ = (
    "AGEING",
    "MOST_S",
    "NET_ALLOCATIONS",
    "SWITCH_INTERVAL_S",
    "Ageing",
    "LoopOptions",
    "calm_interpreter",
    "calm_part",
    "count_as_old",
)

import gc
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

import anyio
from anyio import CancelScope

from penstock.event_loop.entered_once import own_tasks
from penstock.kernel.options import fit_fields

if TYPE_CHECKING:
    from anyio.abc import TaskGroup


T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class LoopOptions:
    """`[loop]`: settings of the whole interpreter that are changed while penstock works."""

    pause_collector: bool = True  #: run the cyclic garbage collector rarely
    short_switches: bool = True  #: let threads take turns at the interpreter every millisecond

    def __post_init__(self) -> None:
        fit_fields(self, "loop")


# A young collection of 15,000 objects takes 2 to 5 ms, whatever the size of the tree and of the heap.
NET_ALLOCATIONS: Final = 15_000
# Not `gc.disable`: the application's own call could not be recognised.
NEVER: Final = 2**30
# With Python's 5 ms, two computing threads held the loop back for 8 to 12 ms.
SWITCH_INTERVAL_S: Final = 0.001
# A save to a distant store takes minutes: it may not change for so long how the garbage of the training is
# collected.
MOST_S: Final = 5.0
# But a million leaves are described and planned for longer. The collector does not know of those that were
# made: set free in between, it would walk all of them again for each quarter of what it knows.
BUSY_COLLECTIONS: Final = 1  #: young ones in a second, of `NET_ALLOCATIONS` each
MOST_PERIODS: Final = 12


@contextmanager
def calm_interpreter(tasks: TaskGroup, options: LoopOptions, *, most_s: float = MOST_S) -> Generator[None]:
    """Change the settings for the block, or for the first `most_s` of it.

    They stay for another such period, up to `MOST_PERIODS` in all, after one in which many objects were made.

    Args:
        tasks: Where the timer runs.
        options: Which of the two.
        most_s: Seconds.
    """
    if not (options.pause_collector or options.short_switches):
        yield
        return

    scope = CancelScope()
    with ExitStack() as held:
        if options.pause_collector:
            held.enter_context(COLLECTOR.changed())
        if options.short_switches:
            held.enter_context(SWITCHES.changed())

        async def end() -> None:
            with scope:
                for _ in range(MOST_PERIODS):
                    before = _n_young_collections()
                    await anyio.sleep(most_s)
                    if _n_young_collections() - before <= BUSY_COLLECTIONS * most_s:
                        break

                held.close()

        tasks.start_soon(end, name="penstock calm")
        try:
            yield
        finally:
            scope.cancel()


def _n_young_collections() -> int:
    n_young: int = gc.get_stats()[0]["collections"]
    return n_young


@asynccontextmanager
async def calm_part(options: LoopOptions) -> AsyncGenerator[None]:
    """Change the settings for a late part of an operation, or for work outside of any."""
    async with own_tasks() as tasks:
        with calm_interpreter(tasks, options):
            yield


def count_as_old() -> None:
    """Have the collector treat every object that there is as old, without looking at one.

    For objects that stay, made by the hundred thousand while `calm_interpreter` puts collections off: the
    first young collection afterwards would walk all of them, with every thread stopped. Garbage among them is
    found by the next full collection. Does nothing if the application froze objects: they would thaw.
    """
    AGEING()


@final
class Ageing:
    """Makes young objects old, and has a full collection run when it would be due. Thread-safe.

    The collector runs a full collection once a quarter of all objects has become old since the last. It does
    not count those that become old here, so they are counted here, or a program that saves at each step could
    gather cyclic garbage without end. It stops every thread for as long as it walks them all, so it is not
    run for less than a million.

    An interpreter counts frozen objects one by one: 10 ms for each 100,000, with every thread stopped. So an
    application that has frozen some is asked once only; if it thaws them later, nothing becomes old here
    until `ask_again` is called.

    Args:
        first: So many objects become old before it is asked how many there are.
        count_frozen: Says how many objects the application froze.
    """

    def __init__(self, first: int = 1_000_000, count_frozen: Callable[[], int] = gc.get_freeze_count) -> None:
        self._lock = Lock()
        self._count_frozen = count_frozen
        self._are_frozen = False
        self._first = self._most = first
        self._aged = 0  # since the last full collection
        self._n_full = 0

    def __call__(self) -> None:
        """Make them old, and collect if it is time."""
        if not gc.isenabled() or self._are_frozen:
            return
        if self._count_frozen():  # costs nothing where there are none
            self._are_frozen = True
            return

        young = len(gc.get_objects(0)) + len(gc.get_objects(1))
        n_full: int = gc.get_stats()[2]["collections"]
        with self._lock:
            if n_full != self._n_full:
                self._aged, self._n_full, self._most = 0, n_full, self._first

            self._aged += young
            gc.freeze()
            if self._aged > self._most:
                self._most = max(self._most, gc.get_freeze_count() // 4)

            gc.unfreeze()  # to the oldest generation
            is_due = self._aged > self._most

        if is_due:
            gc.collect()  # without the lock, because finalizers run

    def ask_again(self) -> None:
        """Ask at the next use whether anything is frozen, because the application thawed what was."""
        self._are_frozen = False


@final
class Setting(Generic[T]):
    """A process-wide setting that several operations may change at once. Thread-safe."""

    def __init__(
        self,
        get: Callable[[], T],
        put: Callable[[T], object],
        meanwhile: Callable[[T], T],
        at_end: Callable[[], object] | None = None,
    ) -> None:
        self._get = get
        self._put = put
        self._meanwhile = meanwhile
        self._at_end = at_end  # called before our value goes
        self._lock = Lock()
        self._users = 0
        self._changes: list[tuple[T, T]] = []  # what it was, and what we made of it

    @contextmanager
    def changed(self) -> Generator[None]:
        """Change it for the block, unless it is changed already. The last block to end restores it."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                before = self._get()
                self._put(self._meanwhile(before))
                self._changes.append((before, self._get()))
        try:
            yield
        finally:
            if self._at_end is not None and self._users == 1 and self._get() == self._changes[-1][1]:
                self._at_end()  # without the lock: a collection runs finalizers, which may do anything

            with self._lock:
                self._users -= 1
                if not self._users:
                    before, ours = self._changes.pop()
                    if self._get() == ours:
                        self._put(before)


def _rarely(thresholds: tuple[int, int, int]) -> tuple[int, int, int]:
    young, middle, old = thresholds
    if not young:  # the collector is switched off
        return 0, middle, old

    return max(young, NET_ALLOCATIONS), NEVER, NEVER


def _age_survivors() -> None:
    """Let what young collections left meanwhile count as old. Only the objects since the last are walked."""
    _, n_collections, _ = gc.get_count()
    if n_collections and gc.isenabled():
        gc.collect(0)
        AGEING()


# One of each in a process, because there is one interpreter. They hold nothing while nothing runs.
AGEING: Final = Ageing()
COLLECTOR: Final = Setting(
    gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds), _rarely, _age_survivors
)
SWITCHES: Final = Setting(
    sys.getswitchinterval, sys.setswitchinterval, lambda interval: min(interval, SWITCH_INTERVAL_S)
)
