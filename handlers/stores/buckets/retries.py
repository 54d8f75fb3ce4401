"""Requests that are sent again: when, for how long, and how many are under way at once.

The client of the bucket repeats nothing by itself, but for the uploads in parts and the copies that are many
requests in one call. So every refusal is seen here: it is counted, reported as an event, and lets all
requests of the process to that bucket slow down.
"""

from __future__ import annotations

__all__ = ("Pace", "RetriedRequests", "RetryPolicy", "pause_in_thread", "seconds_asked_for")

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Condition, Lock
from typing import Final, Generic, TypeVar, final

from penstock.handlers.stores.buckets.object_errors import is_lasting
from penstock.kernel.concurrency.threads import end_if_cancelled
from penstock.kernel.errors import StorageError, ThrottledError, UnreachableError
from penstock.kernel.events import get_logger
from penstock.kernel.protocols.stores import RequestFigures

T = TypeVar("T")

_SLICE_S: Final = 0.1
"""So soon a thread that waits notices that its save or restore was cancelled."""

_RETRY_AFTER: Final = re.compile(r"retry[-_ ]?after\W{1,4}(\d{1,5})", re.IGNORECASE)


@final
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The time for which a request is repeated. Time bounds it, and not a count, which outages outlast.

    Attributes:
        total_s: A request is given up so long after it was sent first.
        most: Repetitions of one request; None for as many as there is time for.
        first_s: About how long the first wait is. Each is about twice as long as the one before.
        longest_s: No wait is longer, unless the server asks for it.
    """

    total_s: float = 120.0
    most: int | None = None
    first_s: float = 0.1
    longest_s: float = 5.0

    def wait_s(
        self, n_failed: int, elapsed_s: float, chance: float, asked_s: float | None = None
    ) -> float | None:
        """Say how long to wait before the next try; None if there is none. Pure.

        Args:
            n_failed: Tries that failed; at least 1.
            elapsed_s: Since the first one began.
            chance: Drawn from 0 to 1, so that those who failed together do not come back together.
            asked_s: How long the server asked to wait. No request is repeated sooner.
        """
        if self.most is not None and n_failed > self.most:
            return None

        left_s = self.total_s - elapsed_s
        longest_s = min(self.longest_s, self.first_s * 2.0 ** min(n_failed - 1, 16))
        wait_s = longest_s * (0.5 + chance / 2)
        if asked_s is not None:
            wait_s += asked_s
        if left_s <= 0 or (asked_s or 0.0) > left_s:
            return None

        return min(wait_s, left_s)  # the last try is made when the time is over, and not before


def seconds_asked_for(problem: str) -> float | None:
    """Return the Retry-After of a refusal, in seconds, where the client repeats what the server said."""
    found = _RETRY_AFTER.search(problem)
    return None if found is None else float(found[1])


@final
class Pace:
    """The limit on requests under way: lower while the server refuses, then higher again. Thread-safe.

    Each refusal of a request halves their number, unless it was sent before the number was last halved: those
    that are refused together are one sign. As many answers as may be under way raise it by one. It has no
    bound as long as nothing is refused.
    """

    __slots__ = ("_changed", "_era", "_in_flight", "_limit")

    def __init__(self) -> None:
        self._changed = Condition(Lock())
        self._limit: float | None = None
        self._in_flight = 0
        self._era = 0  # how often it was slowed down

    @property
    def limit(self) -> int | None:
        """The number of requests that may be under way; None for any number."""
        limit = self._limit
        return None if limit is None else int(limit)

    def enter(self, wait: Callable[[Condition], None]) -> int:
        """Wait until one more request may be sent, and count it. Returns what `leave` wants to know.

        Args:
            wait: Called with the lock of the condition held; waits for it for a while, or raises.
        """
        with self._changed:
            while self._limit is not None and self._in_flight >= int(self._limit):
                wait(self._changed)

            self._in_flight += 1
            return self._era

    def leave(self, era: int, *, refused: bool | None) -> int | None:
        """Count a request no more.

        Args:
            era: As `enter` returned it.
            refused: Whether the server was too busy for it; None if it said nothing of the kind.

        Returns:
            How many may be under way from now on, if this slowed them down; else None.
        """
        with self._changed:
            under_way, self._in_flight = self._in_flight, self._in_flight - 1
            slowed: int | None = None
            if refused and era == self._era:
                self._era += 1
                before = under_way if self._limit is None else min(self._limit, under_way)
                self._limit = max(1.0, before / 2)
                slowed = int(self._limit) if before > 1 else None
            elif refused is False and self._limit is not None:
                self._limit += 1 / self._limit
                if self._limit > 4 * max(under_way, 16):  # nobody wants so many
                    self._limit = None

            self._changed.notify_all()
            return slowed


def pause_in_thread(seconds: float) -> None:
    """Let the calling thread wait, unless the save or restore that it works for is cancelled."""
    until = time.monotonic() + seconds
    while True:
        end_if_cancelled()
        left_s = until - time.monotonic()
        if left_s <= 0:
            return

        time.sleep(min(left_s, _SLICE_S))


@final
@dataclass(eq=False, slots=True)
class RetriedRequests:
    """Sends requests, and sends them again while the server is too busy or cannot be reached. Thread-safe.

    Attributes:
        policy: How long.
        clock: In seconds; never goes back.
        pause: Waits so many seconds, in the calling thread.
        chance: Draws a number from 0 to 1.
    """

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = pause_in_thread
    chance: Callable[[], float] = random.random
    pace: Pace = field(default_factory=Pace)
    _lock: Lock = field(default_factory=Lock)
    _figures: RequestFigures = field(default_factory=RequestFigures)

    def figures(self) -> RequestFigures:
        """Return the counts of requests so far."""
        with self._lock:
            return self._figures

    def send(
        self,
        operation: str,
        path: str,
        attempt: Callable[[], T],
        *,
        within_s: float | None = None,
        paced: bool = True,
    ) -> T:
        """Return what `attempt()` returns. Blocks until it does, or the time is over.

        Args:
            operation: For the events.
            path: For the events.
            attempt: One request. What it raises ends the matter, but for `ThrottledError` and
                `UnreachableError`.
            within_s: Less time than the policy gives.
            paced: Whether it waits for its turn while the server refuses requests. What must not wait for
                those of a large save is sent at once.

        Raises:
            ThrottledError: If the server was too busy all the time.
            UnreachableError: If it could not be reached all the time.

        Cancellation:
            Noticed while it waits. A request that is under way ends first.
        """
        policy = self.policy
        if within_s is not None and within_s < policy.total_s:
            policy = replace(policy, total_s=within_s)

        since, n_failed = self.clock(), 0
        while True:
            waited_s, error = self._try(attempt, operation, path, paced=paced)
            if not isinstance(error, StorageError):
                self._count(RequestFigures(1, waited_s=waited_s))
                return error.value

            n_failed += 1
            elapsed_s, asked_s = self.clock() - since, seconds_asked_for(error.problem)
            wait_s = policy.wait_s(n_failed, elapsed_s, self.chance(), asked_s)
            was_busy = int(isinstance(error, ThrottledError))
            self._count(RequestFigures(1, int(wait_s is not None), was_busy, waited_s + (wait_s or 0.0)))
            if wait_s is None:
                raise error

            get_logger().warning(
                "store.repeated",
                operation=operation,
                path=path,
                n_failed=n_failed,
                wait_s=round(wait_s, 3),
                error=str(error),
            )
            self.pause(wait_s)

    def _try(
        self, attempt: Callable[[], T], operation: str, path: str, *, paced: bool
    ) -> tuple[float, _Value[T] | StorageError]:
        """Make one try. Returns how long it waited for its turn, and the result or why to try again."""
        if not paced:
            return 0.0, _outcome(attempt)

        begun = self.clock()
        era = self.pace.enter(_wait_a_while)
        waited_s, refused = self.clock() - begun, None
        try:
            found = _outcome(attempt)
            refused = isinstance(found, ThrottledError)
            if isinstance(found, UnreachableError):
                refused = None  # it says nothing of how busy the server is
        finally:
            slowed = self.pace.leave(era, refused=refused)
            if slowed is not None:
                get_logger().warning("store.slowed", operation=operation, path=path, at_once=slowed)

        return waited_s, found

    def _count(self, more: RequestFigures) -> None:
        with self._lock:
            self._figures += more


@final
@dataclass(frozen=True, slots=True)
class _Value(Generic[T]):
    value: T


def _outcome(attempt: Callable[[], T]) -> _Value[T] | StorageError:
    try:
        return _Value(attempt())
    except (ThrottledError, UnreachableError) as error:
        if is_lasting(error):
            raise

        return error


def _wait_a_while(changed: Condition) -> None:
    changed.wait(_SLICE_S)
    end_if_cancelled()
