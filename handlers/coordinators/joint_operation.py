"""One thing that all processes of a job do together, such as a save."""

from __future__ import annotations

__all__ = ("JointOperation",)

import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar, final

from anyio import CancelScope, Lock, create_task_group, get_cancelled_exc_class, sleep, sleep_forever

from penstock.handlers.coordinators import procedures
from penstock.handlers.coordinators.job import Job
from penstock.handlers.coordinators.membership import Membership
from penstock.handlers.coordinators.operation_keys import OperationKeys
from penstock.handlers.coordinators.procedures import Verdict
from penstock.handlers.coordinators.silence import LATER
from penstock.kernel.errors import (
    CoordinationError,
    OutcomeUnknownError,
    PeerError,
    PeerSilentError,
    PlansDifferError,
)

T = TypeVar("T")

GO, COMPARE = b"go ", b"compare "
PUBLISHED = b"published"
MOST_WRITES = 3.0
"""The others wait so many times `JobLimits.write_s` for the decision: the primary writes a part of its own,
waits for those of all others, and completes what they wrote."""

MOST_PIECE: Final = 64 * 1024
"""Bytes of one value; the service is made for small ones."""

NOTHING: Final = "nothing"
END = b"\0"
"""Behind a path, which cannot contain it."""


@final
class JointOperation:
    """One operation on which the processes of a job agree. There is no barrier: one verdict decides.

    Every process calls, inside `running` and in this order: `agree`; `meet`, if they must; `commit`; and
    `publish`. `combine` stands for what follows the meeting, where nothing is published but what is said.
    Of these, `agree` is `compare`, and then `begin` of the primary, `wait_begun` of the others; `commit` is
    `parts` of the primary, `bring` and `wait_decided` of the others.

    One that fails sets the verdict. Then all the others are cancelled within `running`, which raises it:
    no process waits for one that has failed.

    The primary alone judges who is silent. The others judge the primary, by their own clocks and later.

    Args:
        job: What this process knows of the job.
        path: What the operation is about. Operations on one path follow each other; those on different paths
            do not meet, in whatever order the processes begin them.
        is_local: Whether each process publishes on its own disk.
    """

    __slots__ = ("_agreed", "_agreeing", "_job", "_member", "_membership", "_path")

    def __init__(self, job: Job, path: str, *, is_local: bool = False) -> None:
        self._job = job
        self._member = job.member
        self._path = path
        self._membership = Membership(job, path, is_local=is_local)
        self._agreeing = Lock(fast_acquire=True)
        self._agreed: tuple[str, bytes] | None = None

    @property
    def path(self) -> str:
        """The path that it is about, as all processes call it."""
        return self._path

    @property
    def is_local(self) -> bool:
        """True if each process writes and publishes by itself, on its own disk."""
        return self._membership.is_local

    @property
    def identity(self) -> str:
        """A name that no other operation has; empty until it was joined."""
        return self._keys.identity

    @property
    def process_index(self) -> int:
        """The number of this process."""
        return self._member.index

    @property
    def processes(self) -> Sequence[int]:
        """The processes that take part, ascending. The first is the primary."""
        return self._member.processes

    @property
    def is_primary(self) -> bool:
        """True if this process judges, merges and publishes."""
        return self._member.is_primary

    @property
    def publishes(self) -> bool:
        """True if this process makes a place and publishes it: the primary; on local disks each."""
        return self.is_primary or self.is_local

    @property
    def is_alone(self) -> bool:
        """Always false: the coordinator of a process alone gives it a `SoleOperation`."""
        return False

    def at(self, stage: str) -> None:
        """Note the stage that this process is in. The others hear of it with the next heartbeat."""
        self._membership.stage = stage

    @asynccontextmanager
    async def running(self, take_back: Callable[[], Awaitable[bool]] | None = None) -> AsyncGenerator[None]:
        """Join, and stay in touch with the others for as long as the body runs.

        Args:
            take_back: Called if the primary is silent; returns whether it made sure that the primary can
                publish nothing any more. Then it is known how this ended.

        Raises:
            PeerError: If another process ended the operation; the body was cancelled.
            CoordinationError: If the service cannot be reached.

        After a failure, the primary returns only when the others have left their bodies, or cannot be waited
        for: then no process writes into what it removes.

        Cancellation:
            The others hear of it first, within three times `JobLimits.call_s`.
        """
        try:
            await self._membership.join()
        except BaseException as error:
            if self._membership.is_in:  # the others would wait for this process
                await self._membership.end(error)
            raise

        failure: BaseException | None = None
        try:
            async with create_task_group() as tasks:
                self._membership.start(tasks)
                try:
                    yield
                except get_cancelled_exc_class():
                    raise
                except BaseException as error:
                    failure = error

                tasks.cancel_scope.cancel()
        except BaseException as error:  # a cancellation from outside
            await self._membership.end(error)
            raise

        # Raised here, outside any `except` block, so that no exception group becomes its context.
        failure = await self._membership.end(failure or self._membership.ended_by)
        if take_back is not None and self._membership.has_lost_primary(failure):
            async with self._job.within(self._job.limits.call_s, shield=True):
                if await take_back():
                    failure = self._membership.silence_of_primary()

        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback refers to this frame

    async def refuse(self, error: Exception) -> None:
        """Take no part, and tell the others why, instead of `running`. Never raises.

        If the primary begins it later than within a beat, the others do not hear of it.

        Cancellation:
            Delivered after that, and five times `JobLimits.call_s`, at most.
        """
        limits = self._job.limits
        most_s = 2 * limits.call_s if self.is_primary else limits.beat_s
        with CancelScope(shield=True), suppress(CoordinationError, PeerError):
            async with self._job.within(most_s):
                await self._membership.join()

        if self._membership.is_in:
            await self._membership.end(error)

    async def agree(
        self,
        plan: bytes,
        describe: Callable[[], Sequence[str]],
        begin: Callable[[Mapping[int, bytes]], Awaitable[tuple[str, bytes]]],
        beside: bytes = b"",
        enter: Callable[[str], Awaitable[None]] | None = None,
    ) -> tuple[str, bytes]:
        """Say what this process is asked to do; return once all are asked the same; see `Operation.agree`.

        Raises:
            PlansDifferError: If this process, or another one, is asked something else.
            PeerSilentError: If not all came within `JobLimits.join_s`, or the primary says nothing.
            Exception: What `begin` or `enter` raises.
        """
        async with self._agreeing:  # of two stages that come, the first one does it
            if self._agreed is None:
                others = await self.compare(plan, describe, beside)
                if self.is_primary:
                    agreed = await begin({self._member.index: beside, **others})
                    await self.begin(*agreed)
                else:
                    agreed = await self.wait_begun(plan, describe)
                if enter is not None:
                    await enter(agreed[0])

                self._agreed = agreed

            return self._agreed

    async def compare(
        self, plan: bytes, describe: Callable[[], Sequence[str]], beside: bytes = b""
    ) -> Mapping[int, bytes]:
        """Send the plan of this process. The primary waits for those of all, and compares them.

        Args:
            plan: A digest of it, and of whatever else must be equal. As long in all processes.
            describe: Returns it in words, called only if the plans differ: for each leaf its key path, a tab,
                and what it is.
            beside: What else the primary is to know. It need not be equal.

        Returns:
            At the primary, what the others say next to their plans, by index.

        Raises:
            PeerSilentError: At the primary, if not all came within `JobLimits.join_s`.
            PlansDifferError: At the primary, if they differ and the odd one does not say how.
        """
        calls, keys = self._job.calls, self._keys
        if not self.is_primary:
            await self._say("plan", plan + beside)
            return {}

        plans = await self._others("plan", self._job.limits.join_s)
        # Were a deletion left behind, it could be that of the next save to this path.
        async with self._job.within(self._job.limits.call_s, shield=True):
            await self._membership.perform(procedures.close(self._member, self._path, keys))

        self._membership.is_closed = True
        odd = [index for index, found in plans.items() if found[: len(plan)] != plan]
        if not odd:
            return {index: found[len(plan) :] for index, found in plans.items()}

        for at, piece in enumerate(pieces_of(describe())):
            await calls.put(keys.each("tree", at), piece)

        await calls.put(keys.go, COMPARE + plan)
        await sleep(self._job.limits.silence_s)  # an odd one says what differs, and that verdict ends this
        raise PlansDifferError(odd[0], ("it does not say what differs",))

    async def begin(self, place: str, beside: bytes = b"") -> None:
        """Tell the others that they may write, where, and something more. The primary's."""
        self._membership.has_begun = True
        said = place.encode("utf-8", "surrogateescape") + END + beside
        await self._job.calls.put(self._keys.go, GO + said)

    async def wait_begun(self, plan: bytes, describe: Callable[[], Sequence[str]]) -> tuple[str, bytes]:
        """Wait for the primary's `begin`, and return what it said. The arguments are those of `compare`.

        Raises:
            PlansDifferError: If this process is one of those whose plan differs.
            PeerSilentError: If the primary says nothing for too long.
        """
        calls, member, limit_s = self._job.calls, self._member, self._job.limits.patience_s
        said = await calls.wait(self._keys.go, limit_s)
        if said is None:
            raise self._silence_of_primary(limit_s)

        self._membership.is_closed = True
        if said.startswith(GO):
            place, _, beside = said[len(GO) :].partition(END)
            return place.decode("utf-8", "surrogateescape"), beside
        if said == COMPARE + plan:
            await sleep_forever()  # another process says what differs, and that verdict ends this

        theirs = joined(await calls.under(self._keys.each("tree")))
        raise PlansDifferError(member.index, differences(theirs, describe(), (member.primary, member.index)))

    async def meet(self, where: str) -> None:
        """Wait until all processes are here, each in its own time as long as it lives.

        For what all must do at one time, such as a collective of their devices. Between the beginning and the
        parts.

        Args:
            where: A word of letters that tells this meeting from others of the operation.

        Raises:
            PeerSilentError: If not all are here within `JobLimits.write_s`.
        """
        calls, keys, limit_s = self._job.calls, self._keys, self._job.limits.write_s
        if self.is_primary:
            await self._others(f"met_{where}", limit_s)
            await calls.put(keys.start(where), b"1")
            return

        await self._say(f"met_{where}", b"1")
        # Longer than the primary waits for all, which then says who did not come.
        if await calls.wait(keys.start(where), LATER * limit_s) is None:
            raise self._silence_of_primary(LATER * limit_s)

    async def bring(self, part: bytes) -> None:
        """Say that this process's part is durable. From then on it writes nothing more. For the others."""
        self._membership.has_brought = True
        await self._say("part", part)

    async def parts(self) -> Mapping[int, bytes]:
        """Wait for the parts of the other processes, and return them by index. The primary's.

        Raises:
            PeerSilentError: If not all are there within `JobLimits.write_s`.
        """
        parts = await self._others("part", self._job.limits.write_s)
        self._membership.has_all = True
        return parts

    async def commit(
        self, bring: Callable[[], Awaitable[bytes]], merge: Callable[[Mapping[int, bytes]], Awaitable[T]]
    ) -> T | None:
        """Complete what all have written; see `Operation.commit`.

        Raises:
            PeerSilentError: If a part is not there within `JobLimits.write_s`, or the primary says nothing.
            Exception: What `bring` or `merge` raises.
        """
        if self.is_primary:
            return await merge(await self.parts())

        await self.bring(await bring())
        await self.wait_decided()
        return None

    async def decide(self) -> None:
        """Set the verdict that this is published. The primary's; then it publishes, or raises.

        Raises:
            PeerError: If another process ended the operation before.
            CoordinationError: If the service did not answer. Then nothing may be published.

        Cancellation:
            Not before the service has answered, or `JobLimits.call_s` has passed.
        """
        verdict = Verdict(kind="commit", process=self._member.index)
        with CancelScope(shield=True):
            verdict = await self._membership.claim(verdict)

        if verdict.kind != "commit":
            raise verdict.error()

    async def publish(self, publish: Callable[[], Awaitable[str | None]]) -> str | None:
        """Publish, once all agree: the primary does, and the others wait for it, and then take it over.

        On local disks each does, and it counts once all have.

        Returns:
            What `publish` returned in one of them, with its number; see `Operation.publish`.

        Raises:
            PeerError: If the operation was ended, or another process could not publish.
            OutcomeUnknownError: If the primary says nothing after the verdict, or does not know itself.
            Exception: What `publish` raises.
        """
        if self.is_primary:
            await self.decide()
        elif not self.is_local:
            await self.wait_published()

        unpublished = await publish()
        if self.is_local:
            return await self.all_published(unpublished)
        if self.is_primary:
            await self.tell_published()

        return unpublished

    async def combine(self, part: bytes, combined: Callable[[Mapping[int, bytes]], bytes]) -> bytes:
        """Send a part; return the result of the primary's function of the parts of all.

        Args:
            part: Of this process.
            combined: Makes it of all parts, by index. Called in the primary.

        Raises:
            PeerError: If the operation was ended.
            PeerSilentError: If another process, or the primary, says nothing for too long.
        """
        if not self.is_primary:
            await self.bring(part)
            await self.wait_decided()  # which leaves time for the slowest of all to bring its part
            return await self.wait_published()

        made = combined({self._member.index: part, **await self.parts()})
        await self.decide()
        await self.tell_published(made)
        return made

    async def tell_published(self, told: bytes = b"") -> None:
        """Tell the others that the checkpoint is visible, with the result. The primary's last message."""
        async with self._job.within(self._job.limits.call_s, shield=True):
            await self._job.calls.put(self._keys.result, PUBLISHED + told)

    async def wait_decided(self) -> None:
        """Wait until the primary has decided to publish. For the others.

        While it has not, a failure or a cancellation of any process ends the operation for all.

        Raises:
            PeerSilentError: If the primary decides nothing for too long, although it lives.
        """
        limit_s = MOST_WRITES * self._job.limits.write_s
        async with self._job.within(limit_s):
            await self._membership.decided.wait()

        if not self._membership.decided.is_set():
            raise self._silence_of_primary(limit_s)

    async def wait_published(self) -> bytes:
        """Wait until the primary has published; return its result. For the others.

        Raises:
            PeerError: If the operation was ended, or the primary could not publish.
            OutcomeUnknownError: If the primary says nothing after the verdict, or does not know itself.
        """
        timeout_s = self._job.limits.write_s
        told = await self._job.calls.wait(self._keys.result, timeout_s)
        if told is None:
            primary = self._member.primary
            problem = f"process {primary} said nothing for {timeout_s:g} s"
            raise OutcomeUnknownError(self._path, problem, primary)
        if not told.startswith(PUBLISHED):
            raise self._membership.told_instead(Verdict.decoded(told))

        return told[len(PUBLISHED) :]

    async def all_published(self, unpublished: str | None = None) -> str | None:
        """Say that this process has published on its own disk, and return once all have.

        Args:
            unpublished: Why it has not, although all of it is whole; None if it has.

        Returns:
            What one of them has said so, the same in all.

        Raises:
            PeerError: If another process could not publish, or fell silent before it had.
            OutcomeUnknownError: If the primary says nothing any more.

        Cancellation:
            Not before the service has answered, or `JobLimits.call_s` has passed: what is published counts.
        """
        told = "" if unpublished is None else f"process {self._member.index}: {unpublished}"
        own = PUBLISHED + told.encode("utf-8", "replace")
        if not self.is_primary:
            async with self._job.within(self._job.limits.call_s, shield=True):
                await self._say("done", own)

            return (await self.wait_published()).decode("utf-8", "replace") or None

        done = await self._others("done", self._job.limits.write_s)
        failed = [said for said in done.values() if not said.startswith(PUBLISHED)]
        if failed:
            raise Verdict.decoded(failed[0]).error()

        said = next((said for said in (own, *done.values()) if said != PUBLISHED), PUBLISHED)
        problem = said[len(PUBLISHED) :]
        await self.tell_published(problem)
        return problem.decode("utf-8", "replace") or None

    @property
    def _keys(self) -> OperationKeys:
        return self._membership.keys

    async def _say(self, what: str, data: bytes) -> None:
        await self._membership.perform(procedures.say(self._member, self._keys, what, data))

    async def _others(self, what: str, limit_s: float) -> Mapping[int, bytes]:
        found = await self._membership.perform(procedures.bring_all(self._keys, what, limit_s))
        absent = [index for index in self._member.processes[1:] if index not in found]
        if absent:
            stages = {index: self._membership.stage_of(index) for index in absent}
            raise self._membership.silence_of(stages, limit_s)

        return found

    def _silence_of_primary(self, limit_s: float) -> PeerSilentError:
        primary = self._member.primary
        return PeerSilentError({primary: self._membership.stage_of(primary)}, limit_s)


def pieces_of(lines: Sequence[str]) -> Iterator[bytes]:
    """Yield a plan, a line for each leaf, as values for the service."""
    data = zlib.compress("\n".join(lines).encode("utf-8", "surrogateescape"), 1)
    for at in range(0, len(data), MOST_PIECE):
        yield data[at : at + MOST_PIECE]


def joined(pieces: Mapping[str, bytes]) -> list[str]:
    """Return the lines that `pieces_of` cut, by the place of each piece."""
    data = b"".join(pieces[key] for key in sorted(pieces, key=int))
    try:
        return zlib.decompress(data).decode("utf-8", "surrogateescape").split("\n")
    except (zlib.error, ValueError) as error:
        raise CoordinationError(f"the primary's plan cannot be read: {error}") from error


def differences(theirs: Sequence[str], mine: Sequence[str], processes: tuple[int, int]) -> list[str]:
    """Return a line for each leaf that is not the same.

    Args:
        theirs: The primary's plan; a line begins with a leaf's key path and a tab.
        mine: That of another process.
        processes: The index of the primary, and of that other one.
    """
    (primary, index), at_primary, here = processes, _by_leaf(theirs), _by_leaf(mine)
    names = [*at_primary, *[name for name in here if name not in at_primary]]
    return [
        f"{name}: process {primary} has {at_primary.get(name, NOTHING)}, "
        f"process {index} has {here.get(name, NOTHING)}"
        for name in names
        if at_primary.get(name) != here.get(name)
    ]


def _by_leaf(lines: Sequence[str]) -> dict[str, str]:
    return {name: what for name, _, what in [line.partition("\t") for line in lines]}
