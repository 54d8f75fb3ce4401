"""The part of a process in an operation: its heartbeats, the verdict it watches for, and silent peers."""

from __future__ import annotations

__all__ = ("Membership",)

import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar, final

from anyio import CancelScope, Event, current_time, sleep
from anyio.abc import TaskGroup

from penstock.handlers.coordinators import procedures
from penstock.handlers.coordinators.job import Job
from penstock.handlers.coordinators.operation_keys import OperationKeys
from penstock.handlers.coordinators.procedures import Call, Procedure, Verdict, verdict_of
from penstock.handlers.coordinators.silence import LATER, FailureDetector, Heartbeat
from penstock.kernel.errors import CoordinationError, OutcomeUnknownError, PeerSilentError, PenstockError

T = TypeVar("T")

FIRST_BEATS: Final = 2**32
"""Below this, heartbeats begin to count."""

SERVICE_PROCESS: Final = 0
"""The process in which jax runs the coordination service."""


@final
class Membership:
    """The part of one process in one operation.

    Args:
        job: What this process knows of the job.
        path: What the operation is about.
        is_local: Whether each process publishes on its own disk.
    """

    __slots__ = (
        "_detector",
        "_first",
        "_is_gone",
        "_job",
        "_path",
        "_scope",
        "_was_told",
        "decided",
        "ended_by",
        "has_all",
        "has_begun",
        "has_brought",
        "is_closed",
        "is_local",
        "keys",
        "stage",
        "verdict",
    )

    def __init__(self, job: Job, path: str, *, is_local: bool = False) -> None:
        self._first = secrets.randbelow(FIRST_BEATS)  # tells its first heartbeat from that of another object
        self._job = job
        self._path = path
        self._scope = CancelScope()
        self._detector = self._new_detector(0.0)
        self._is_gone = False  # whether the others have forgotten the operation
        self._was_told = False  # whether the primary lives, and does not know the outcome itself
        self.keys = OperationKeys("")  #: of the operation, once it was joined
        self.is_local = is_local  #: whether each process publishes on a disk of its own
        self.stage = "join"  #: where this process is
        self.is_closed = False  #: whether all have come, and nobody can join any more
        self.has_begun = False  #: whether the primary has let the others write
        self.has_brought = False  #: whether the primary may have this process's part, and so publish
        self.has_all = False  #: whether the primary needs nothing more of the others
        self.verdict: Verdict | None = None  #: the one that holds, once it is known here
        self.decided = Event()  #: set once it is known to be a commit
        self.ended_by: PenstockError | None = None  #: what a task next to the body has to say

    async def join(self) -> None:
        """Take part: the primary begins an operation, the others find it by the path.

        Raises:
            PlansDifferError: If the processes were not asked for the same operation.
            PeerSilentError: If the primary begins none within `JobLimits.patience_s`.

        Cancellation:
            Of the primary, not before the service has answered, or `JobLimits.call_s` has passed. If `keys`
            name an operation then, the others wait for this process: see `end`.
        """
        job, member = self._job, self._job.member
        first = Heartbeat(self._first, "join").encoded()
        if member.is_primary:
            if not self.is_in:
                # Random, so that no key of an earlier save to this path is taken for one of this save.
                self.keys = OperationKeys(secrets.token_hex(8))

            self._detector = self._new_detector(current_time())  # from here on, others may wait for this
            # A call that was sent may be carried out: its outcome is known before a cancellation goes on.
            async with job.within(job.limits.call_s, shield=True):
                await self.perform(procedures.begin(member, self._path, self.keys, first))

            await self.perform(procedures.check_begun(member, self._path))
            return

        async with job.seeking(self._path), job.within(job.limits.patience_s):
            await self.perform(procedures.find(member, self._path, first))

        if not self.is_in:
            async with job.within(job.limits.call_s, shield=True):
                await self.perform(procedures.give_up(member, self._path))

            raise PeerSilentError({member.primary: None}, job.limits.patience_s)

    @property
    def is_in(self) -> bool:
        """True if the others wait for this process, or may."""
        return bool(self.keys.identity)

    def start(self, tasks: TaskGroup) -> None:
        """Begin. Whatever goes wrong cancels `tasks` and is in `ended_by`."""
        self._scope = tasks.cancel_scope
        now = current_time()
        if not self._job.member.is_primary:
            self._detector = self._new_detector(now)

        primary = {self._job.member.primary: Heartbeat(-1, "join").encoded()}
        self._detector = self._detector.hear(primary, now, now)
        for work in (self._beat, self._watch, self._listen, self._look_around):
            tasks.start_soon(self._guarded, work)

    async def perform(self, procedure: Procedure[T]) -> T:
        """Make the calls of a procedure, and note the verdict if it learns one."""
        return await self._job.perform(procedure, self._answer)

    def has_lost_primary(self, error: BaseException | None) -> bool:
        """True if an error of this process is that the primary is silent."""
        member = self._job.member
        if member.is_primary or self._is_gone:
            return False

        is_silent = isinstance(error, PeerSilentError) and member.primary in error.seen
        return is_silent or self._is_unknown_by_silence(error)

    def told_instead(self, verdict: Verdict) -> PenstockError:
        """Return the error to raise if the primary announced this instead of publishing."""
        if verdict.kind != "unknown":
            return verdict.error()

        self._was_told = True
        return OutcomeUnknownError(self._path, verdict.text, verdict.process, verdict.stage)

    def silence_of_primary(self) -> PeerSilentError:
        """Return the error that says so, where it is known that nothing will be published."""
        primary = self._job.member.primary
        return PeerSilentError({primary: self.stage_of(primary)}, self._detector.limit_s)

    def silence_of(self, silent: Mapping[int, str | None], limit_s: float) -> PeerSilentError:
        """Return the error that blames those who are silent, unless they blamed this process before."""
        if any(map(self._detector.gave_up, silent)):
            silent = {self._job.member.index: self.stage}

        return PeerSilentError(silent, limit_s)

    def stage_of(self, index: int) -> str | None:
        """Return where a process was heard of last; None if it never was."""
        return self._detector.stage_of(index)

    async def claim(self, verdict: Verdict) -> Verdict:
        """Set the verdict unless there is one, and return the one that holds.

        Raises:
            CoordinationError: If the service does not answer in time. It may be set nevertheless, later.
        """
        job, standing = self._job, None
        async with job.within(job.limits.call_s):
            standing = await self.perform(procedures.claim(job.member, self.keys, verdict))

        if standing is None:
            problem = f"the coordination service did not answer within {job.limits.call_s:g} s"
            raise CoordinationError(problem)

        return standing

    async def end(self, error: BaseException | None) -> BaseException | None:
        """Leave the operation; tell the others that this process ended by `error`. Never raises.

        Returns:
            What is to be raised: `error`, or `OutcomeUnknownError` if the primary is silent and may still
            publish: it has this process's part, and the verdict against that could not be set.

        Cancellation:
            Delivered after three times `JobLimits.call_s` at most.
        """
        job, limits, primary = self._job, self._job.limits, self._job.member.primary
        of_primary = (
            isinstance(error, PeerSilentError)
            and primary in error.seen
            and self.verdict is None
            and not self._is_gone
        )
        # The service mostly lives in the primary, and is silent with it.
        is_silent = of_primary or self._is_unknown_by_silence(error)
        most_s = limits.beat_s / 2 if is_silent else 3 * limits.call_s
        with suppress(CoordinationError):
            async with job.within(most_s, shield=True):
                await self.perform(
                    procedures.end(
                        job.member,
                        self._path,
                        self.keys,
                        None if error is None else verdict_of(error, job.member.index, self.stage),
                        self.verdict,
                        is_local=self.is_local,
                        has_begun=self.has_begun,
                        is_closed=self.is_closed,
                    )
                )

        if isinstance(error, PeerSilentError) and self.verdict is not None and self.verdict.kind != "commit":
            return self.verdict.error()  # which holds for all, whomever this process takes for silent
        if of_primary and self.has_brought and (self.verdict is None or self.verdict.kind == "commit"):
            return self._unknown("it had heard that it must not publish")

        return error

    def _new_detector(self, now: float) -> FailureDetector:
        limits = self._job.limits
        if self._job.member.is_primary:
            return FailureDetector(limits.silence_s, limits.beat_s, now, others_s=LATER * limits.silence_s)

        return FailureDetector(LATER * limits.silence_s, limits.beat_s, now)

    def _answer(self, call: Call) -> Any:
        if call.kind == "learn":
            self.verdict = call.value
        elif call.kind == "enter":
            self.keys = call.value

    def _is_unknown_by_silence(self, error: BaseException | None) -> bool:
        """True if the outcome is unknown here as the primary fell silent, which would know it itself."""
        is_own = self._job.member.is_primary or self._was_told or self._is_gone
        return isinstance(error, OutcomeUnknownError) and not is_own

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except PenstockError as error:
            if self.ended_by is None:
                self.ended_by = error

            self._scope.cancel()

    async def _beat(self) -> None:
        """Say again and again where this process is. `join` said it first."""
        job, count = self._job, self._first
        own = self.keys.each("at", job.member.index)
        while True:
            await sleep(job.limits.beat_s)
            count += 1
            beat = Heartbeat(count, self.stage).encoded()
            await job.calls.put_to_its_end(own, beat, job.limits.beat_s / 4)

    async def _watch(self) -> None:
        """Wait for a verdict, and raise it if it is no commit."""
        found = None
        while found is None:
            found = await self._job.calls.wait(self.keys.verdict, self._job.limits.patience_s)

        self.verdict = Verdict.decoded(found)
        if self.verdict.kind != "commit":
            raise self.verdict.error()

        self.decided.set()

    async def _listen(self) -> None:
        """Hear again and again where the others are: the primary hears all, the others the primary."""
        job, member = self._job, self._job.member
        while True:
            await sleep(job.limits.beat_s)
            if self._needs_nobody:
                return

            asked_s = current_time()
            if member.is_primary:
                found = await job.calls.by_process(self.keys.each("at"))
            else:
                value = await job.calls.wait(self.keys.each("at", member.primary), 0.0)
                if value is None:
                    raise self._of_forgotten()

                found = {member.primary: value}

            self._detector = self._detector.hear(found, asked_s, current_time())

    async def _look_around(self) -> None:
        """Judge who is silent. Runs next to `_listen`: a service that does not answer is silence, too."""
        job, member = self._job, self._job.member
        is_served_by_primary = member.primary == SERVICE_PROCESS and not member.is_primary
        while True:
            await sleep(job.limits.beat_s / 2)
            if self._needs_nobody:
                return

            self._detector = self._detector.look(current_time())
            silent = self._detector.silent(by_answers=not is_served_by_primary)
            silent.pop(member.index, None)
            if silent and member.is_primary and not self.is_local:
                # Who has brought its part is not needed any more: the save goes on without it.
                brought = await job.calls.by_process(self.keys.each("part"))
                silent = {index: stage for index, stage in silent.items() if index not in brought}
                if len(brought) == member.count - 1:  # the last to bring fell silent before it could say so
                    await job.calls.put(self.keys.here("part"), b"1", replace=True)
            if silent and not self._needs_nobody:
                raise self._of_silence(silent)
            if self._detector.is_unanswered and not is_served_by_primary:
                problem = f"the coordination service did not answer for {self._detector.limit_s:g} s"
                raise CoordinationError(f"{problem}; it runs in process {SERVICE_PROCESS} of the job")

    @property
    def _needs_nobody(self) -> bool:
        """True if what remains is the primary's own to do, and the others may have left."""
        return (
            self._job.member.is_primary and not self.is_local and (self.has_all or self.verdict is not None)
        )

    def _unknown(self, before: str) -> OutcomeUnknownError:
        primary, after = self._job.member.primary, "after" if self.verdict is not None else "before"
        problem = f"process {primary} fell silent {after} {before}"
        return OutcomeUnknownError(self._path, problem, primary, self.stage_of(primary))

    def _of_silence(self, silent: dict[int, str | None]) -> PenstockError:
        if self.verdict is not None and not self._job.member.is_primary:  # a commit, or this would have ended
            return self._unknown("it had decided to publish")

        return self.silence_of(silent, self._detector.limit_s)

    def _of_forgotten(self) -> PenstockError:
        """Return the error for a process that stood still until the others had forgotten the operation."""
        self._is_gone = True
        index = self._job.member.index
        if self.has_brought or self.verdict is not None:
            problem = f"process {index} stood still until the others had forgotten how it ended"
            return OutcomeUnknownError(self._path, problem, index, self.stage)

        return PeerSilentError({index: self.stage}, self._job.limits.silence_s)
