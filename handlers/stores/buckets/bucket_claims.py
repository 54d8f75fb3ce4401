"""Claims on paths of a bucket. Each is a lease: an object that one process holds, and writes anew in time.

A claim that was not renewed for as long as it says is taken over by one that needs the path, with a swap that
only one wins. From then on every swap of the old holder fails. It swaps its claim before it publishes or
deletes anything, so it finds out first. How old a claim is, the server's clock says alone.

The page "Commits in a bucket" of docs/design tells what each step is for.
"""

from __future__ import annotations

__all__ = ("CLAIM", "LEASE_S", "ClaimRecord", "Claims", "ConditionalWrites", "ObjectClaim", "Purpose")

import json
import math
import time
import uuid
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, final, get_args

from penstock.handlers.stores.buckets.objects import Created, Objects
from penstock.handlers.stores.publishing.process_identity import ProcessIdentity, ThisProcess, this_process
from penstock.kernel.errors import ClaimLostError, InUseError, StorageError, UnsupportedByStoreError

CLAIM: Final = ".penstock-saving"
"""Ends the key of the claim, which is beside what it claims."""

# It is renewed each third of this, so two renewals may fail; and a pod that replaces a killed one can wait
# as long.
LEASE_S: Final = 90.0

Purpose: TypeAlias = Literal["saving", "committing", "removing", "holding", "left"]
"""`saving`: objects are being written. `committing`: all are there, and the mark comes next. `removing`: what
is there is no checkpoint, or will be none. `holding`: a manager writes into the directory of steps. `left`:
it was given up, and the next one takes it; it hides what a process that was stopped may still write."""

_ADVICE: Final = "if nobody else saves there, the option single_writer of its table [store.*] says so"

_TRIES: Final = 4
"""A claim may be given up while it is being looked at."""

_PER_LEASE: Final = 3
"""A claim is renewed each third of its lease: two renewals may fail before anybody takes it."""


@final
@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """Whose a claim is and what for: the content of its object."""

    token: str  #: unique to one save, removal or hold
    purpose: Purpose
    owner: ProcessIdentity | None  #: None if that cannot be read
    mark: bytes = b""  #: what the mark will say, once `purpose` is `committing`
    process: str = ""  #: the `key` of the owner; empty in claims of earlier versions
    lease_s: float = 0.0  #: it is renewed more often than that; 0 of earlier versions, which do not

    def encode(self, owner: ProcessIdentity) -> bytes:
        """Return it as JSON that differs from every other, also from the same claim written twice."""
        return owner.encode(
            id=self.token,
            purpose=self.purpose,
            mark=b64encode(self.mark).decode(),
            process=self.process,
            lease_s=repr(self.lease_s),
            written=uuid.uuid4().hex,
        )

    @classmethod
    def decode(cls, data: bytes) -> ClaimRecord:
        """Return what `encode` made these bytes of; without an owner, if it did not."""
        try:
            found: Any = json.loads(data)
            members = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
            token, purpose = str(members["id"]), members["purpose"]
            mark = b64decode(str(members["mark"]), validate=True)
            lease_s = float(members.get("lease_s", 0.0))
        except (ValueError, TypeError, KeyError, Base64Error):
            return cls("", "saving", None)

        if purpose not in get_args(Purpose) or not 0 <= lease_s < math.inf:
            return cls(token, "saving", None)

        owner = ProcessIdentity.decode(data)
        return cls(token, purpose, owner, mark, str(members.get("process", "")), lease_s)

    def is_of(self, claim: ObjectClaim) -> bool:
        """True if the object was written by the holder of a claim that was not given up. Pure."""
        return self.purpose != "left" and (self.token, self.process) == (claim.token, claim.process)

    def is_held_by(self, process: ThisProcess) -> bool:
        """True if a process holds it, and has not given it up. Pure."""
        return self.process == process.key and process.holds(self.token)

    def is_given_up(self, me: ThisProcess) -> bool:
        """True if its process is known to do nothing more under it. Blocking: looks for the process.

        If not, only its age tells.
        """
        if self.purpose == "left" or me.has_given_up(self.process, self.token):
            return True
        if self.process == me.key:
            return False

        return self.owner is not None and self.owner.has_ended(me.identity)

    def ends_after_s(self, me: ThisProcess, older_than_s: float | None) -> float | None:
        """Return at which age it is over; None if at none. Pure.

        Args:
            me: The calling process.
            older_than_s: What somebody said about claims of processes that cannot be asked. It does not count
                for a process that is seen to be alive.
        """
        is_seen = self.owner is not None and self.owner.is_beside(me.identity)
        said = () if older_than_s is None or is_seen else (older_than_s,)
        own = (self.lease_s,) if self.lease_s > 0 else ()
        return min((*own, *said), default=None)


@final
@dataclass(slots=True, eq=False)
class ObjectClaim:
    """A claim as its owner knows it, or one that writes at the same time. Thread-safe through `Claims`."""

    final: str  #: the key that is claimed
    token: str
    purpose: Purpose = "saving"
    mark: bytes = b""  #: of a save that had only its mark to put
    found: Literal["nothing", "leftovers", "committing"] = "nothing"  #: what lay there when it was taken
    tag: str | None = None  #: by which it is swapped; None until it is known
    renewed: float = 0.0  #: by this machine's clock, the begin of the request that last renewed it
    is_lost: bool = False
    holder: str = ""  #: which process has it now, if it was lost
    process: str = ""  #: `ThisProcess.key` of its owner; empty if that is another process
    lock: Lock = field(default_factory=Lock)  #: held while it is swapped

    @property
    def key(self) -> str:
        """The key of its object."""
        return self.final + CLAIM


class ConditionalWrites(Protocol):
    """Conditions that a server must keep to, so that of two savers one is refused."""

    def create(self, key: str, data: bytes) -> Created:
        """Write an object only if there is none."""
        ...

    def swap(self, key: str, data: bytes, tag: str, within_s: float | None = None) -> str | None:
        """Write an object only if no other process did meanwhile."""
        ...


def boot_seconds() -> float:
    """Return the time by a clock that goes on while the machine sleeps, where there is one."""
    boottime: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


@final
class Claims:
    """Takes, renews and drops the claims of one store. Every method blocks; thread-safe.

    Args:
        client: Of the bucket.
        store: Named by errors.
        single_writer: Whether a server that ignores conditions is used all the same.
        lease_s: A claim that is not renewed for so many seconds is over.
        process: In whose name; by default the calling one.
        clock: Of this machine. It only says when to renew; the server's says what is over.
    """

    __slots__ = (
        "_clock",
        "_is_checked",
        "_process",
        "_single_writer",
        "_store",
        "client",
        "lease_s",
    )

    def __init__(
        self,
        client: Objects,
        store: object,
        *,
        single_writer: bool = False,
        lease_s: float = LEASE_S,
        process: ThisProcess | None = None,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self.client, self._store, self._single_writer = client, store, single_writer
        self.lease_s, self._process, self._clock = lease_s, process, clock
        self._is_checked = False

    @property
    def me(self) -> ThisProcess:
        """The process that claims. In a fork it is another one."""
        return this_process() if self._process is None else self._process

    def take(self, final: str, purpose: Purpose, older_than_s: float | None = None) -> ObjectClaim:
        """Claim a key, or take over one that was given up or not renewed.

        Args:
            final: The key.
            purpose: What for. One who saves and finds `committing` goes on with that, for what was about to
                be published never goes back.
            older_than_s: See `ClaimRecord.ends_after_s`.

        Raises:
            InUseError: If another process has it.
            UnsupportedByStoreError: If the server does not keep to conditions.
        """
        me = self.me
        claim = ObjectClaim(final, uuid.uuid4().hex, purpose, process=me.key)
        if self._single_writer:
            self.try_conditions(f"{claim.key}.probe", claim.token.encode())

        me.hold(claim.token)  # first: its object is not to be taken for one that was given up
        try:
            self._take(claim, me, older_than_s)
        except BaseException:
            me.let_go(claim.token)
            raise

        return claim

    def _take(self, claim: ObjectClaim, me: ThisProcess, older_than_s: float | None) -> None:
        client, key, path = self.client, claim.key, self.client.path(claim.final)
        for _ in range(_TRIES):
            claim.renewed = self._clock()
            data = self._written(claim, claim.purpose, claim.mark)
            # The condition "if absent" decides between two that claim at once, and a lost reply counts: the
            # token shows whose object it is.
            if client.create(key, data) != "other":
                self._check_conditions(claim, data)
                return

            there = client.read(key)
            if there is None or there.tag is None:
                continue

            other = ClaimRecord.decode(there.data)
            if not other.is_given_up(me):
                self._check_over(claim, other, older_than_s)

            finishes = other.purpose == "committing" and claim.purpose == "saving"
            purpose: Purpose = "committing" if finishes else claim.purpose
            mark = other.mark if finishes else b""
            claim.renewed = self._clock()
            # Fails if another process renewed or took it since it was read.
            tag = client.swap(key, self._written(claim, purpose, mark), there.tag)
            if tag is not None:
                claim.purpose, claim.mark, claim.tag = purpose, mark, tag
                claim.found = "committing" if finishes else "leftovers"
                return

        raise InUseError(path, "others claim it and give it up all the time")

    def _check_over(self, claim: ObjectClaim, other: ClaimRecord, older_than_s: float | None) -> None:
        """Return if a claim was not renewed in time.

        Raises:
            InUseError: If its holder may be at work.
        """
        path = self.client.path(claim.final)
        by = "an unknown process" if other.owner is None else str(other.owner)
        ends_after_s = other.ends_after_s(self.me, older_than_s)
        if ends_after_s is None:
            lifted = f"`penstock gc --older-than SECONDS {path}` takes its claim over"
            raise InUseError(path, f"it is claimed by {by}, and not for a time; if that has ended, {lifted}")

        age_s = self._age_s(claim.key)
        if age_s < ends_after_s:
            renewed = f"renewed {max(age_s, 0):.0f} s ago"
            over = f"unless it is renewed again, that ends in {math.ceil(ends_after_s - age_s)} s"
            raise InUseError(path, f"it is claimed by {by}, {renewed}; {over}")

    def _age_s(self, key: str) -> float:
        """Return how long ago the server says that a claim was written, asking it what time it is."""
        claim, probe = self.client.head(key), f"{key}.clock"
        # By the server's clock, since that of the holder and the own one may differ by minutes.
        self.client.put(probe, b"what time is it?")
        now = self.client.head(probe)
        self.client.delete([probe])
        if claim is None or now is None:  # it was given up, or another process asked the time as well
            return 0.0

        return (now.modified - claim.modified).total_seconds()

    def swap(self, claim: ObjectClaim, purpose: Purpose, mark: bytes = b"") -> bool:
        """Write the purpose of a claim into it, which also renews it; return whether it is still ours.

        Raises:
            StorageError: If the server does not say.
        """
        with claim.lock:
            return self._swap(claim, purpose, mark)

    def _swap(self, claim: ObjectClaim, purpose: Purpose, mark: bytes, within_s: float | None = None) -> bool:
        if claim.is_lost or claim.process != self.me.key:  # the second is so in a fork of the process
            return False

        begun, data = self._clock(), self._written(claim, purpose, mark)
        tag = None if claim.tag is None else self.client.swap(claim.key, data, claim.tag, within_s)
        if tag is None:  # not known yet; or an earlier swap came through, and its reply did not
            there = self.client.read(claim.key)
            record = None if there is None else ClaimRecord.decode(there.data)
            if there is not None and there.tag is not None and record is not None and record.is_of(claim):
                tag = self.client.swap(claim.key, data, there.tag, within_s)
            elif record is not None and record.owner is not None:
                claim.holder = str(record.owner)

        if tag is None:
            claim.is_lost = True
            return False

        claim.tag, claim.purpose, claim.mark, claim.renewed = tag, purpose, mark, begun
        return True

    def renew(self, claim: ObjectClaim) -> None:
        """Write a claim anew, unless it is being swapped. A server that does not answer is no failure yet."""
        if claim.lock.acquire(blocking=False):
            try:
                # Requests are repeated for longer than a lease lasts: the next beat must not wait for that.
                with suppress(StorageError):
                    self._swap(claim, claim.purpose, claim.mark, self.lease_s / _PER_LEASE)
            finally:
                claim.lock.release()

    def keep(self, claim: ObjectClaim) -> None:
        """Renew a claim if it is due: for work without an event loop that would do so meanwhile.

        Raises:
            ClaimLostError: If another process took it over.
        """
        if self.is_due(claim):
            self.renew(claim)

        self.check(claim)

    def is_due(self, claim: ObjectClaim) -> bool:
        """True if a claim was not renewed for a third of its lease. Before that it is not taken over."""
        return self._clock() - claim.renewed > self.lease_s / _PER_LEASE

    def check(self, claim: ObjectClaim) -> None:
        """Raise `ClaimLostError` if a claim is known to be lost. Makes no request."""
        if claim.is_lost:
            raise ClaimLostError(self.client.path(claim.final), claim.holder)

    def change(self, claim: ObjectClaim, purpose: Purpose, mark: bytes = b"") -> None:
        """Swap a claim as `swap` does.

        Raises:
            ClaimLostError: If it is not ours any more.
        """
        if not self.swap(claim, purpose, mark):
            raise ClaimLostError(self.client.path(claim.final), claim.holder)

    def drop(self, claim: ObjectClaim, *, asks: bool = False) -> None:
        """Delete a claim, unless another process has it. If that fails, this process does not hold it either.

        An object is deleted without a condition. So the claim is swapped first, which has one, unless that
        was done just now.

        Args:
            claim: The claim.
            asks: Whether it is swapped even if this machine's clock says that it was renewed just now. The
                clock of a virtual machine may stand still with it.
        """
        self.me.let_go(claim.token)
        is_fresh = not asks and not self.is_due(claim)
        if not claim.is_lost and (is_fresh or self.swap(claim, "left")):
            self.client.delete([claim.key])

    def is_claimed(self, key: str) -> bool:
        """True if somebody builds or removes there, or died while doing so."""
        return self.client.head(key + CLAIM) is not None

    def _written(self, claim: ObjectClaim, purpose: Purpose, mark: bytes) -> bytes:
        me = self.me
        return ClaimRecord(claim.token, purpose, me.identity, mark, me.key, self.lease_s).encode(me.identity)

    def try_conditions(self, key: str, data: bytes) -> None:
        """Do without conditions if the server ignores them: the caller has said that there is one writer."""
        if self._single_writer and not self._is_checked:
            self.client.put(key, data)
            self.client.uses_conditions = self.client.keeps_conditions(key, data)
            self.client.delete([key])
            self._is_checked = True

    def _check_conditions(self, claim: ObjectClaim, data: bytes) -> None:
        """Try once, on an object that is ours, whether the server keeps to conditions at all."""
        if self._is_checked:
            return
        if not self.client.keeps_conditions(claim.key, data):
            self.client.delete([claim.key])
            path = self.client.path(claim.final)
            raise UnsupportedByStoreError("save to", path, self._store, ConditionalWrites, _ADVICE)

        self._is_checked = True
