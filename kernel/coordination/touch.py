"""How a process stays in touch with the others while they do one thing together."""

from __future__ import annotations

__all__ = ("LATER", "Touch", "say")

import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, final

from anyio import CancelScope, Event, current_time, move_on_after, sleep
from anyio.abc import TaskGroup

from penstock.kernel.coordination.heartbeats import Heartbeat, SilenceJudge
from penstock.kernel.coordination.job import MOST_REMEMBERED, Job
from penstock.kernel.coordination.operation_keys import OperationKeys
from penstock.kernel.coordination.outcomes import forget, keep_outcome
from penstock.kernel.coordination.verdicts import Verdict, verdict_of
from penstock.kernel.errors import CoordinationError, OutcomeUnknownError, PeerSilentError, PenstockError

LATER = 1.5
"""The others wait this much longer for the primary than it does for them. With one limit for both, someone
who waits for the primary, which waits for a third process, would blame the primary."""

FIRST_BEATS: Final = 2**32
"""Below this, heartbeats begin to count."""


@final
class Touch:
    """Heartbeats, the watch for a verdict, and the judgement of who is silent.

    Args:
        job: What this process knows of the job.
        keys: Of the operation.
        path: What it is about, for errors.
        is_local: Whether each process publishes on a disk of its own.
    """

    __slots__ = (
        "_first",
        "_is_local",
        "_job",
        "_judge",
        "_keys",
        "_own_beat",
        "_path",
        "_scope",
        "_was_told",
        "decided",
        "ended_by",
        "has_begun",
        "has_brought",
        "is_closed",
        "stage",
        "verdict",
    )

    def __init__(self, job: Job, keys: OperationKeys, path: str, *, is_local: bool = False) -> None:
        self._first = secrets.randbelow(FIRST_BEATS)  # tells its first heartbeat from that of another object
        self._is_local = is_local
        self._job = job
        self._keys = keys
        self._own_beat = keys.each("at", job.index)
        self._path = path
        self._scope = CancelScope()
        self._judge = SilenceJudge(job.limits.silence_s * (1.0 if job.is_primary else LATER))
        self._was_told = False  #: whether the primary lives, and does not know the outcome itself
        self.stage = "join"  #: where this process is
        self.is_closed = False  #: whether all have come, and nobody can join any more
        self.has_begun = False  #: whether the primary has let the others write
        self.has_brought = False  #: whether the primary may have this process's part, and so publish
        self.verdict: Verdict | None = None  #: the one that holds, once it is known here
        self.decided = Event()  #: set once it is known to be a commit
        self.ended_by: PenstockError | None = None  #: what a task beside the body has to say

    @property
    def identity(self) -> str:
        """Of the operation."""
        return self._keys.identity

    async def come(self) -> bool:
        """Say for the first time that this process is here; return whether it was not here before.

        An earlier Checkpointer of the process may have been here, so the service is asked, and may be again;
        see `KeyValueCalls.put_once`. Not of what this one left: its keys may be forgotten by now.

        Cancellation:
            Not before the service has answered, or `JobLimits.call_s` has passed.
        """
        if self.identity in self._job.left:
            return False

        first = Heartbeat(self._first, "join").encoded()
        with CancelScope(shield=True), move_on_after(self._job.limits.call_s):
            return await self._job.calls.put_once(self._own_beat, first)

        return False

    def start(self, tasks: TaskGroup) -> None:
        """Begin. Whatever goes wrong cancels `tasks` and is in `ended_by`."""
        self._scope = tasks.cancel_scope
        self._judge.look({self._job.primary: Heartbeat(-1, "join").encoded()}, current_time())
        for work in (self._beat, self._watch, self._listen, self._look_around):
            tasks.start_soon(self._guarded, work)

    def has_lost_primary(self, error: BaseException | None) -> bool:
        """Whether an error of this process is that the primary is silent."""
        if self._job.is_primary:
            return False

        is_silent = isinstance(error, PeerSilentError) and self._job.primary in error.seen
        return is_silent or self._is_unknown_by_silence(error)

    def _is_unknown_by_silence(self, error: BaseException | None) -> bool:
        """Whether the outcome is unknown here as the primary fell silent, which would know it itself."""
        is_own = self._job.is_primary or self._was_told
        return isinstance(error, OutcomeUnknownError) and not is_own

    def told_instead(self, verdict: Verdict) -> PenstockError:
        """Return what is to be raised if the primary told this instead of having published."""
        if verdict.kind != "unknown":
            return verdict.error()

        self._was_told = True
        return OutcomeUnknownError(self._path, verdict.text, verdict.process, verdict.stage)

    def silence_of_primary(self) -> PeerSilentError:
        """Return the error that says so, where it is known that nothing will be published."""
        primary = self._job.primary
        return PeerSilentError({primary: self.stage_of(primary)}, LATER * self._job.limits.silence_s)

    def stage_of(self, index: int) -> str | None:
        """Return where a process was heard of last; None if it never was."""
        return self._judge.stage_of(index)

    async def claim(self, verdict: Verdict) -> Verdict:
        """Set the verdict unless there is one, and return the one that holds.

        Raises:
            CoordinationError: If the service does not answer in time. It may be set nevertheless, later.
        """
        job, key = self._job, self._keys.verdict
        with move_on_after(job.limits.call_s):
            if await job.calls.put(key, verdict.encoded()):
                self.verdict = verdict
                return verdict

            standing = await job.calls.wait(key, job.limits.call_s)
            if standing is not None:
                self.verdict = Verdict.decoded(standing)
                return self.verdict

        raise CoordinationError(f"the coordination service did not answer within {job.limits.call_s:g} s")

    async def end(self, error: BaseException | None) -> BaseException | None:
        """Leave the operation; tell the others that this process ended by `error`. Never raises.

        The primary waits until all others have left what failed, if they all came: it is about to remove what
        they write, and the keys.

        Returns:
            What is to be raised: `error`, or `OutcomeUnknownError` if the primary is silent and may still
            publish: it has this process's part, and the verdict against that could not be set.

        Cancellation:
            Delivered after three times `JobLimits.call_s` at most.
        """
        self._job.left.append(self.identity)
        limits, primary = self._job.limits, self._job.primary
        of_primary = isinstance(error, PeerSilentError) and primary in error.seen and self.verdict is None
        # The service mostly lives in the primary, and is silent with it.
        is_silent = of_primary or self._is_unknown_by_silence(error)
        with (
            CancelScope(shield=True),
            move_on_after(limits.beat_s / 2 if is_silent else 3 * limits.call_s),
            suppress(CoordinationError),
        ):
            standing = None
            if error is not None:
                standing = await self._tell(verdict_of(error, self._job.index, self.stage))

            await self._leave(standing)

        if of_primary and self.has_brought and (self.verdict is None or self.verdict.kind == "commit"):
            return self._unknown("it had heard that it must not publish")

        return error

    async def _tell(self, verdict: Verdict) -> Verdict:
        """Tell how this process ended; return the verdict that holds for all."""
        standing = self.verdict or await self.claim(verdict)
        if standing.kind == "commit":  # all know that it was to be published
            if self._job.is_primary:
                await self._job.calls.put(self._keys.result, verdict.encoded())
            elif self._is_local:  # unless it has published
                await say(self._job, self._keys, "done", verdict.encoded())

        return standing

    async def _leave(self, ended: Verdict | None) -> None:
        """Forget the keys that nobody needs any more: the last one to leave those of this operation."""
        job = self._job
        failed = ended is not None and ended.kind != "commit"
        if failed and job.is_primary and (self.has_begun or await self._all_came()):
            # One that is silent will not come; those that live need no more than a moment.
            wait_s = job.limits.beat_s if ended is not None and ended.kind == "silent" else job.limits.call_s
            await job.calls.wait(self._keys.here("left"), wait_s)

        n_left = await job.calls.count(self._keys.left)
        if failed and not job.is_primary and n_left == job.count - 1:
            await job.calls.put(self._keys.here("left"), b"1")
        join_key = job.join_key(self._path)
        if n_left == job.count and (job.is_primary or self.is_closed):
            await forget(job, self.identity, join_key if job.is_primary and not self.is_closed else None)
        elif job.is_primary and failed:
            await keep_outcome(job, self.identity, join_key)
        elif job.is_primary:
            job.ended.append(self.identity)
            if len(job.ended) > MOST_REMEMBERED:
                await forget(job, job.ended.popleft())

    async def _all_came(self) -> bool:
        return len(await self._job.calls.under(self._keys.each("at"))) == self._job.count

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except PenstockError as error:
            if self.ended_by is None:
                self.ended_by = error

            self._scope.cancel()

    async def _beat(self) -> None:
        """Say again and again where this process is. `come` said it first."""
        job, count = self._job, self._first
        while True:
            await sleep(job.limits.beat_s)
            count += 1
            beat = Heartbeat(count, self.stage).encoded()
            await job.calls.put_to_its_end(self._own_beat, beat, job.limits.beat_s / 4)

    async def _watch(self) -> None:
        """Wait for a verdict, and raise it if it is no commit."""
        found = None
        while found is None:
            found = await self._job.calls.wait(self._keys.verdict, self._job.limits.patience_s)

        self.verdict = Verdict.decoded(found)
        if self.verdict.kind != "commit":
            raise self.verdict.error()

        self.decided.set()

    async def _listen(self) -> None:
        """Hear again and again where the others are: the primary hears all, the others the primary."""
        job = self._job
        while True:
            await sleep(job.limits.beat_s)
            if self._is_over:
                return

            found: dict[int, bytes] = {}
            if job.is_primary:
                found = await job.calls.by_process(self._keys.each("at"))
            else:
                value = await job.calls.wait(self._keys.each("at", job.primary), 0.0)
                found = {} if value is None else {job.primary: value}

            self._judge.look(found, current_time())

    async def _look_around(self) -> None:
        """Judge who is silent. Beside `_listen`, since a service that does not answer is silence, too."""
        job = self._job
        while True:
            await sleep(job.limits.beat_s / 2)
            if self._is_over:
                return

            silent = self._judge.look({}, current_time())
            silent.pop(job.index, None)
            if silent:
                raise self._of_silence(silent)

    @property
    def _is_over(self) -> bool:
        """Whether the primary has decided: what remains is its own to do, and the others may have left."""
        return self.verdict is not None and self._job.is_primary and not self._is_local

    def _unknown(self, before: str) -> OutcomeUnknownError:
        primary, after = self._job.primary, "after" if self.verdict is not None else "before"
        problem = f"process {primary} fell silent {after} {before}"
        return OutcomeUnknownError(self._path, problem, primary, self.stage_of(primary))

    def _of_silence(self, silent: dict[int, str | None]) -> PenstockError:
        job = self._job
        if self.verdict is not None and not job.is_primary:  # a commit, or this would have ended
            return self._unknown("it had decided to publish")

        return PeerSilentError(silent, job.limits.silence_s * (1.0 if job.is_primary else LATER))


async def say(job: Job, keys: OperationKeys, what: str, data: bytes) -> None:
    """Say something, unless this process has said it; the last of the others says that all have."""
    is_new = await job.calls.put(keys.each(what, job.index), data)
    if is_new and await job.calls.count(keys.counter(what)) == job.count - 1:
        await job.calls.put(keys.here(what), b"1")
