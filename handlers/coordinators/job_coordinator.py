"""The coordinator of a job with several processes: its operations, what the primary announces, shared reads.

Shared reads: nothing need be done together, and a process that restores alone reads by itself. The n-th time
that one reads a path, it looks for what another one left there as its own n-th. The first to come reads, and
the others wait for it, but not for long. What was left may be old: a reader compares the identity of the
checkpoint first, and reads by itself if that is another one.

| key | who sets it | what it says |
| --- | --- | --- |
| `penstock/read/<path>/<n>/reader` | the first to come | which process reads |
| `penstock/read/<path>/<n>/<k>` | the reader | what it read, in pieces |
| `penstock/read/<path>/<n>/told` | the reader | how many pieces there are; none if it has nothing to tell |
"""

from __future__ import annotations

__all__ = ("MOST_BYTES", "JobAnnouncements", "JobCoordinator", "JobReads")

import hashlib
import json
import secrets
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, cast, final

from anyio import CancelScope, Lock, move_on_after, sleep

from penstock.handlers.coordinators.job import Job, KeyValueCalls
from penstock.handlers.coordinators.job_options import JobLimits, JobOptions
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.handlers.coordinators.operation_keys import ROOT, OperationKeys, announcements_key
from penstock.handlers.coordinators.procedures import LOOK_BEATS, Member, look
from penstock.kernel.errors import (
    ConfigError,
    CoordinationError,
    InactiveProcessError,
    PeerFailedError,
    PeerSilentError,
)
from penstock.kernel.protocols.coordinator import KeyValues, SoleOperation

# gRPC, by which jax's service is asked, refuses messages above 4 MiB by default.
_PIECE: Final = 2**20
MOST_BYTES: Final = 16 * _PIECE
"""The service keeps it in the memory of one process. What is longer each process reads itself."""
_WAIT_S: Final = 10.0
"""For who reads. A process that waits longer reads itself."""
# In a shield: a service that hangs may not keep a cancelled restore.
_TELLING_S: Final = 5.0
_KEPT: Final = 2
"""So many of its reads each process leaves with the service."""


@final
@dataclass(slots=True, eq=False)
class JobReads:
    """The reads that the processes of a job give each other. In one event loop.

    Args:
        job: Of this process.
    """

    job: Job
    _n: Counter[str] = field(default_factory=Counter[str])
    _left: deque[str] = field(default_factory=deque[str])  # the keys of what this process said

    async def turn(self, path: str) -> tuple[str, bytes | None]:
        """Return what another process read of `path`; None if this one is to read it, and then to `tell`.

        Returns:
            The turn; empty if there is nothing to say. And what was read.

        Cancellation:
            Delivered at once. If this process was to read, the others wait for a while and read themselves.
        """
        digest = hashlib.blake2b(
            f"{self.job.member.group}\0{path}".encode("utf-8", "surrogateescape"), digest_size=12
        )
        place = f"{ROOT}/read/{digest.hexdigest()}"
        self._n[place] += 1
        turn, calls = f"{place}/{self._n[place]}", self.job.calls
        try:
            if await calls.put(f"{turn}/reader", str(self.job.member.index).encode()):
                return turn, None

            n_pieces = await calls.wait(f"{turn}/told", _WAIT_S)
            found = [await calls.wait(f"{turn}/{k}", 0.0) for k in range(int(n_pieces or 0))]
        except CoordinationError:
            return "", None

        pieces = [piece for piece in found if piece is not None]
        return "", b"".join(pieces) if found and len(pieces) == len(found) else None

    async def tell(self, turn: str, data: bytes) -> None:
        """Announce what was read, or that it was unreadable or too long. Forgets earlier announcements.

        Cancellation:
            Delivered once the service has answered, after `_TELLING_S` at most.
        """
        if not turn:
            return

        calls = self.job.calls
        pieces = (
            [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)] if len(data) <= MOST_BYTES else []
        )
        self._left.append(turn)
        with CancelScope(shield=True), move_on_after(_TELLING_S):
            try:
                for k, piece in enumerate(pieces):
                    await calls.put(f"{turn}/{k}", piece)

                await calls.put(f"{turn}/told", str(len(pieces)).encode())
                while len(self._left) > _KEPT:
                    await calls.delete(f"{self._left.popleft()}/")
            except CoordinationError:
                return  # the others read themselves


MOST_KEYS: Final = 8
"""Of how many announcements the keys are kept."""

MOST_REMEMBERED: Final = 64
"""How many each announcement repeats, for a process that is so far behind."""


@final
class JobAnnouncements:
    """One value after another that the primary tells and each other process hears, by name.

    All processes ask for the same names in the same order; the n-th `hear` of a name gets what its n-th
    `tell` said. A process that lags finds what it missed in what was said since. Nothing is sent before the
    first call.

    Args:
        job: What this process knows of the job.
        about: What they are about, such as a root of steps. One object at a time for each.
    """

    __slots__ = ("_about", "_asked", "_job", "_kept", "_key_begun", "_keys", "_known", "_token", "_turn")

    def __init__(self, job: Job, about: str) -> None:
        self._job = job
        self._about = about
        self._key_begun = announcements_key(about, job.member.about, job.member.group)
        self._keys = OperationKeys("")
        self._asked: Counter[str] = Counter()  # how often this process asked for each name
        self._known: dict[str, str] = {}  # the last ones, by name and number
        self._kept: deque[str] = deque()  # whose keys are there
        self._token = b""  # tells that this object came from an earlier one of this process
        self._turn = Lock()
        self._renew()

    async def tell(self, name: str, value: str, *, is_again: bool = False) -> None:
        """Announce a decision. Called by the primary.

        Raises:
            CoordinationError: If the service cannot be reached.
        """
        await self._join()
        calls, numbered = self._job.calls, self._numbered(name, is_again)
        self._remember({numbered: value})
        await calls.put(self._key(numbered), json.dumps(self._known).encode(), replace=True)
        if numbered not in self._kept:
            self._kept.append(numbered)
        if len(self._kept) > MOST_KEYS:
            await calls.delete(self._key(self._kept.popleft()))

    async def hear(self, name: str, *, is_again: bool = False) -> str:
        """Return what the primary decided, as soon as it has. For the others.

        Raises:
            PeerFailedError: If the primary has left, and will not say.
            PlansDifferError: If the primary waits for this process elsewhere.
            PeerSilentError: If the primary says nothing within `JobLimits.patience_s`.
            CoordinationError: If the service cannot be reached.
        """
        numbered, limit_s = self._numbered(name, is_again), self._job.limits.patience_s
        asked, n_waits, seen = f"the decision {name!r} about {self._about}", 0, frozenset[str]()
        async with self._job.within(limit_s):
            while numbered not in self._known:
                await self._join(asked)
                await self._listen(numbered)
                n_waits += 1
                if n_waits % LOOK_BEATS == 0 and numbered not in self._known:
                    seen = await self._job.perform(look(self._job.member, self._about, seen, asked))

        if numbered not in self._known:
            raise PeerSilentError({self._job.member.primary: None}, limit_s)

        return self._known[numbered]

    async def ask(self, what: str) -> None:
        """Tell the primary that something was asked of this process. For the others.

        Raises:
            PeerSilentError: If the primary begins nothing within `JobLimits.patience_s`.
            CoordinationError: If the service cannot be reached.
        """
        job, limit_s, has_asked = self._job, self._job.limits.patience_s, False
        async with job.within(limit_s):
            await self._join(f"to tell of {what!r} about {self._about}")
            await job.calls.put(f"{self._keys.all}{what}", b"1", replace=True)
            has_asked = True

        if not has_asked:
            raise PeerSilentError({job.member.primary: None}, limit_s)

    async def take(self, what: str) -> bool:
        """Return whether another process has asked for this since the last call. Called by the primary."""
        await self._join()
        key = f"{self._keys.all}{what}"
        if await self._job.calls.wait(key, 0.0) is None:
            return False

        await self._job.calls.delete(key)
        return True

    async def leave(self) -> None:
        """Ask and tell no more. The last process to leave deletes the keys. Never raises.

        Cancellation:
            Delivered after `JobLimits.call_s` at most.
        """
        if not self._keys.identity:
            return

        job = self._job
        with suppress(CoordinationError):
            async with job.within(job.limits.call_s, shield=True):
                if job.member.is_primary:
                    await self._take_back()
                if await job.calls.count(self._keys.left) == job.member.count:
                    await job.calls.delete(self._keys.all)

        self._keys = OperationKeys("")
        self._renew()

    async def _take_back(self) -> None:
        """Delete the key by which these are joined, if all have joined and no later ones began."""
        came = await self._job.calls.under(self._keys.each("at"))
        if len(came) == self._job.member.count - 1 and await self._begun(0.0) == self._keys:
            await self._job.calls.delete(self._key_begun)

    def _renew(self) -> None:
        self._token = secrets.token_hex(8).encode()

    def _key(self, numbered: str) -> str:
        return f"{self._keys.each('said')}{numbered}"

    def _numbered(self, name: str, is_again: bool) -> str:
        self._asked[name] += not (is_again and self._asked[name])
        found = f"{name}/{self._asked[name]}"
        while len(self._asked) > MOST_REMEMBERED:
            del self._asked[next(iter(self._asked))]

        return found

    def _remember(self, told: dict[str, str]) -> None:
        self._known.update(told)
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]

    async def _listen(self, numbered: str) -> None:
        """Wait a moment for one; if it does not come, look whether it was said long ago, or never will be."""
        job = self._job
        found = await job.calls.wait(self._key(numbered), job.limits.beat_s)
        if found is None:
            await self._look_back(numbered)
        else:
            self._remember(cast("dict[str, str]", json.loads(found)))
        if numbered in self._known:
            return

        begun = await self._begun(0.0)
        if begun is None:
            await self._look_back(numbered)  # to its last words
            if numbered not in self._known:
                raise PeerFailedError(
                    job.member.primary, None, None, "it was closed, and decides nothing more"
                )
        elif begun != self._keys:
            await job.calls.delete(self._keys.all)  # the primary did; this process was late
            self._keys = OperationKeys("")

    async def _look_back(self, numbered: str) -> None:
        """Look whether one was said before others."""
        told, wanted = await self._job.calls.under(self._keys.each("said")), json.dumps(numbered).encode()
        found = next((value for value in told.values() if wanted in value), None)
        if found is not None:
            self._remember(cast("dict[str, str]", json.loads(found)))

    async def _begun(self, timeout_s: float) -> OperationKeys | None:
        """Return the keys of the operations that the primary has begun."""
        found = await self._job.calls.wait(self._key_begun, timeout_s)
        return None if found is None else OperationKeys(found.decode())

    async def _join(self, asked: str = "") -> None:
        """Take part, unless this process does already; wait for the primary to begin.

        Args:
            asked: What this process waits for, in words, should the primary wait for it elsewhere.
        """
        job, member, seen = self._job, self._job.member, frozenset[str]()
        async with self._turn:
            while not self._keys.identity:
                keys = await self._begun(0.0 if member.is_primary else LOOK_BEATS * job.limits.beat_s)
                if member.is_primary:
                    if keys is not None:  # some process has not left it, or left it unseen
                        await job.calls.delete(keys.all)

                    begun = OperationKeys(secrets.token_hex(8))
                    await job.calls.put(self._key_begun, begun.identity.encode(), replace=True)
                    self._keys = begun  # not before: who is cancelled has begun nothing
                elif keys is None:
                    seen = await job.perform(look(member, self._about, seen, asked))
                elif await job.calls.put_once(keys.each("at", member.index), self._token):
                    self._keys = keys
                else:  # this process was here: the primary has not begun the next
                    await sleep(job.limits.beat_s)


PLACES: Final = f"{ROOT}/places/"
"""One key for each process, for as long as the job lives."""


@final
class JobCoordinator:
    """One process of a job agrees with the others, through a service of small values.

    Args:
        service: The same for all of them.
        process_index: Which one this is.
        process_count: How many the job has.
        limits: How long they wait for each other.
        options: Which of them take part; by default all. The first of those is the primary.

    Raises:
        ConfigError: If there is no such process.
    """

    __slots__ = ("_job", "_n_processes", "_place", "_reads")

    def __init__(
        self,
        service: KeyValues,
        process_index: int,
        process_count: int,
        limits: JobLimits | None = None,
        options: JobOptions | None = None,
    ) -> None:
        if not 0 <= process_index < process_count:
            raise ConfigError("process_index", f"must be from 0 to {process_count - 1}, not {process_index}")

        options = options or JobOptions()
        chosen = options.active_processes
        if chosen is not None and chosen[-1] >= process_count:
            problem = f"{chosen[-1]} is none of the job's, which are 0 to {process_count - 1}"
            raise ConfigError("job.active_processes", problem)

        everybody = range(process_count)
        processes = everybody if chosen is None or len(chosen) == process_count else chosen
        group = "" if processes is everybody else ",".join(map(str, processes))
        limits = limits or JobLimits()
        member = Member(process_index, processes, group, options.key_prefix or "", limits)
        self._job = Job(KeyValueCalls(service, limits.beat_s), member)
        self._reads = JobReads(self._job)
        self._n_processes = process_count
        self._place: str | None = None  # where this process has said that it is

    def nested(self) -> JobCoordinator:
        """Return a coordinator for parts of an operation of this one, for the event loop that runs here."""
        other = object.__new__(JobCoordinator)
        other._job = self._job.in_this_loop()
        other._reads = JobReads(other._job)
        other._n_processes, other._place = self._n_processes, self._place
        return other

    @property
    def process_index(self) -> int:
        """The number of this process in the job."""
        return self._job.member.index

    @property
    def processes(self) -> Sequence[int]:
        """The processes that take part, ascending."""
        return self._job.member.processes

    @property
    def is_primary(self) -> bool:
        """True if this process judges, merges and publishes."""
        return self._job.member.is_primary

    @property
    def calls(self) -> Mapping[str, int]:
        """Counts of the calls of the service so far, by name."""
        return dict(self._job.calls.counted)

    def operation(self, path: str, *, is_local: bool = False) -> JointOperation | SoleOperation:
        """Return an operation on `path`, to be joined with the others, if there are any.

        Args:
            path: What it is about, the same in all processes.
            is_local: Whether each of them publishes on its own disk.

        Raises:
            InactiveProcessError: If this process takes no part.
        """
        if not self._has_others():
            return SoleOperation(path, self.process_index)

        return JointOperation(self._job, path, is_local=is_local)

    def announcements(self, about: str) -> JobAnnouncements | None:
        """Return what the primary decides alone about something that lasts, such as a root of steps.

        Raises:
            InactiveProcessError: If this process takes no part.
        """
        return JobAnnouncements(self._job, about) if self._has_others() else None

    def shared_reads(self) -> JobReads | None:
        """Return how processes share what they read; None if this one is alone, or takes no part."""
        member = self._job.member
        return self._reads if member.count > 1 and member.index in member.processes else None

    async def count_neighbours(self, place: str) -> tuple[int, bool]:
        """Announce the host of this process, and count the processes there; see `Coordinator`."""
        calls, index = self._job.calls, self._job.member.index
        if self._place != place:
            await calls.put(f"{PLACES}{index}", place.encode(), replace=True)
            self._place = place

        places = await calls.under(PLACES)
        here = [index for index, found in places.items() if found == place.encode()]
        return max(len(here), 1), len(places) >= self._n_processes

    def _has_others(self) -> bool:
        member = self._job.member
        if member.index not in member.processes:
            raise InactiveProcessError(member.index, member.processes)

        return member.count > 1
