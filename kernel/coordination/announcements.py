"""Decisions that the primary makes alone and all others follow, outside of any operation."""

from __future__ import annotations

__all__ = ("JobAnnouncements",)

import json
import secrets
from collections import Counter, deque
from contextlib import suppress
from typing import Final, cast, final

from anyio import Lock, sleep

from penstock.kernel.coordination.job import Job
from penstock.kernel.coordination.operation_keys import OperationKeys, announcements_key
from penstock.kernel.coordination.procedures import LOOK_BEATS, look
from penstock.kernel.errors import CoordinationError, PeerFailedError, PeerSilentError

MOST_KEYS: Final = 8
"""Of how many announcements the keys are kept."""

MOST_REMEMBERED: Final = 64
"""How many each announcement repeats, for a process that is so far behind."""


@final
class JobAnnouncements:
    """One value after another that the primary tells and each other process hears, by name.

    All processes ask for the same names in the same order; the n-th `hear` of a name gets what its n-th
    `tell` said. Who is behind finds what it missed in what was told since. Nothing is sent before the first
    call.

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

    async def tell(self, name: str, value: str) -> None:
        """Say what was decided. The primary's.

        Raises:
            CoordinationError: If the service cannot be reached.
        """
        await self._join()
        calls, numbered = self._job.calls, self._numbered(name)
        self._remember({numbered: value})
        await calls.put(self._key(numbered), json.dumps(self._known).encode(), replace=True)
        self._kept.append(numbered)
        if len(self._kept) > MOST_KEYS:
            await calls.delete(self._key(self._kept.popleft()))

    async def hear(self, name: str) -> str:
        """Return what the primary decided, as soon as it has. For the others.

        Raises:
            PeerFailedError: If the primary has left, and will not say.
            PlansDifferError: If the primary waits for this process elsewhere.
            PeerSilentError: If the primary says nothing within `JobLimits.patience_s`.
            CoordinationError: If the service cannot be reached.
        """
        numbered, limit_s = self._numbered(name), self._job.limits.patience_s
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
        """Return whether any other process has asked this since the last call. The primary's."""
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
        """Delete what says that these are to be joined, if all have joined and no later ones are."""
        came = await self._job.calls.under(self._keys.each("at"))
        if len(came) == self._job.member.count - 1 and await self._begun(0.0) == self._keys:
            await self._job.calls.delete(self._key_begun)

    def _renew(self) -> None:
        self._token = secrets.token_hex(8).encode()

    def _key(self, numbered: str) -> str:
        return f"{self._keys.each('said')}{numbered}"

    def _numbered(self, name: str) -> str:
        self._asked[name] += 1
        found = f"{name}/{self._asked[name]}"
        while len(self._asked) > MOST_REMEMBERED:
            del self._asked[next(iter(self._asked))]

        return found

    def _remember(self, told: dict[str, str]) -> None:
        self._known.update(told)
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]

    async def _listen(self, numbered: str) -> None:
        """Wait a moment for one; if it does not come, look whether it was told long ago, or never will be."""
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
        """Look whether one was told before others."""
        told, wanted = await self._job.calls.under(self._keys.each("said")), json.dumps(numbered).encode()
        found = next((value for value in told.values() if wanted in value), None)
        if found is not None:
            self._remember(cast("dict[str, str]", json.loads(found)))

    async def _begun(self, timeout_s: float) -> OperationKeys | None:
        """Return the keys of what the primary has begun."""
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
