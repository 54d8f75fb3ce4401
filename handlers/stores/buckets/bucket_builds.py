"""The saves that build in a bucket: how each claims its path, publishes, and undoes what it wrote.

Nothing in a bucket is renamed. A save claims the path by an object beside it that one process alone can
create, writes every object where it will stay, and puts the mark last. A prefix that is claimed and has no
mark is no checkpoint for anybody.

The page "Commits in a bucket" of docs/design tells what each step is for.
"""

from __future__ import annotations

__all__ = ("MARK", "Build", "Builds", "ConditionalWrites", "Left")

import errno
import uuid
from collections.abc import Collection
from contextlib import suppress
from threading import Lock
from typing import Final, Literal, Protocol, TypeAlias, final

from penstock.handlers.stores.buckets.build_states import MARK, STAGED, Build, Claim, Found
from penstock.handlers.stores.buckets.claim_records import CLAIM, ClaimRecord, Purpose, what_to_do
from penstock.handlers.stores.buckets.objects import Created, Objects, Stat
from penstock.kernel.concurrency.process_identity import ProcessIdentity
from penstock.kernel.errors import (
    AccessDeniedError,
    InUseError,
    OutcomeUnknownError,
    StorageError,
    UnsupportedByStoreError,
)

Left: TypeAlias = Literal["removed", "published", "kept"]
"""What became of what somebody left; `kept` if he may be at work."""

_ADVICE: Final = "if nobody else saves there, the option single_writer of its table [store.*] says so"

_TRIES: Final = 4
"""A claim may be given up while it is being looked at."""


class ConditionalWrites(Protocol):
    """What a server must keep to, so that of two savers one is told."""

    def create(self, key: str, data: bytes) -> Created:
        """Write an object only if there is none."""
        ...

    def swap(self, key: str, data: bytes, tag: str) -> str | None:
        """Write an object only if nobody else did meanwhile."""
        ...


@final
class Builds:
    """Claims, publishes and undoes, for one store. Every method blocks; thread-safe.

    Args:
        client: Of the bucket.
        store: Named by errors.
        single_writer: Whether a server that ignores conditions is used all the same.
    """

    __slots__ = ("_client", "_is_checked", "_lock", "_mine", "_single_writer", "_store", "given_up", "live")

    def __init__(self, client: Objects, store: object, *, single_writer: bool = False) -> None:
        self._client, self._store, self._single_writer = client, store, single_writer
        self._lock = Lock()
        self._mine: ProcessIdentity | None = None
        self._is_checked = False
        self.live: dict[str, Build] = {}  #: by place
        self.given_up: set[str] = set()  #: tokens of claims that were left behind; they bind nobody

    def begin(self, final: str, place: str, file: str | None) -> Build:
        """Claim a key for a save. What an ended process left there is removed, or published if it was whole.

        Raises:
            InUseError: If another save or removal claims it.
            StorageError: With `errno.EEXIST` if something is published there.
            UnsupportedByStoreError: If the server does not keep to conditions.
        """
        claim = self._take(final, "saving")
        try:
            is_free = self._prepare(claim, final, file)
        except BaseException:
            self.given_up.add(claim.token)  # the next save goes on from here
            raise

        if not is_free:
            self._client.delete([claim.key])
            raise StorageError("save", self._client.path(final), "is there already", errno.EEXIST)

        build = self.live[place] = Build(final, place, file, claim)
        return build

    def share(self, build: Build) -> str:
        """Let other processes write into a build. Returns its new place, which tells them the claim."""
        del self.live[build.place]
        build.place, build.is_shared = f"{build.place}/{build.claim.token}", True
        self.live[build.place] = build
        return build.place

    def enter(self, build: Build) -> None:
        """Write into what another process began."""
        if self._single_writer:
            probe = uuid.uuid4().hex  # other processes try at the same time
            self._try_conditions(f"{build.claim.key}.probe-{probe}", probe.encode())

        self.live[build.place] = build

    def _prepare(self, claim: Claim, final: str, file: str | None) -> bool:
        """Put the mark that a dead save did not come to put, or remove what it left. Return if it is free."""
        if claim.found == "committing":
            self._client.create(f"{final}/{MARK}", claim.mark)
        if self._is_published(final, file):
            return False
        if claim.found == "leftovers":
            self._wipe(final)

        return True

    def _wipe(self, final: str) -> None:
        for prefix in (final, f"{final}{CLAIM}{STAGED}"):
            self._client.delete(list(self._client.walk(prefix)))

    def create(self, build: Build, key: str, data: bytes | memoryview) -> Created:
        """Create an object of a save, or replace one that the save itself created."""
        with build.lock:
            is_own = key in build.created
            build.created.add(key)
        if is_own:
            self._client.put(key, data)
            return "created"

        created = self._client.create(key, data)
        if created != "created":
            with build.lock:
                build.created.discard(key)
                if created == "same":
                    build.met.add(key)

        return created

    def publish(self, build: Build) -> None:
        """Make visible what was built, if the claim is still this save's.

        Raises:
            InUseError: If somebody took it over.
            StorageError: With `errno.EEXIST` if something is published there; or if the server refuses.
            OutcomeUnknownError: If it is not known whether the mark is there.
        """
        if self._is_published(build.final, build.file):
            raise StorageError("publish", self._client.path(build.final), "is there already", errno.EEXIST)
        if build.file is not None:
            self._publish_file(build, build.file)
            return

        mark = build.published_mark()
        self._change(build, "committing", mark)
        build.phase = "committing"
        try:
            created = self._client.create(f"{build.final}/{MARK}", mark)
        except AccessDeniedError:
            self._change(build, "saving")
            build.phase = "building"
            raise
        except StorageError as error:
            self._end(build)
            self.given_up.add(build.claim.token)
            said = f"its mark could not be put ({error.problem}), and the next save to it puts it"
            raise OutcomeUnknownError(self._client.path(build.final), said) from error

        if created == "other":
            self._change(build, "saving")
            build.phase = "building"
            raise StorageError("publish", self._client.path(build.final), "is there already", errno.EEXIST)

        self._end(build)
        with suppress(StorageError):  # it is published, and who finds the claim later sees that
            self._client.delete([build.claim.key])

    def discard(self, build: Build) -> None:
        """Remove the objects that a save created, unless it is published or somebody took its claim over.

        An object that it may not own stays, and so does the claim: it hides the object until the next save.
        """
        if build.phase == "building":
            self._end(build)
            if build.is_joined:
                return  # its owner removes it
            if build.is_shared:
                self._discard_shared(build)
                return

            self.given_up.add(build.claim.token)
            if self._swap(build.claim, "removing"):
                self._client.delete(sorted(build.created))
                if not build.met:
                    self._client.delete([build.claim.key])

    def _discard_shared(self, build: Build) -> None:
        """Remove what all processes of a job wrote.

        The claim stays, since one of them that is stopped may still write; but whoever comes may take it.
        """
        try:
            if self._swap(build.claim, "removing"):
                self._wipe(build.final)
                self._swap(build.claim, "left")
        finally:
            self.given_up.add(build.claim.token)

    def remove(self, final: str) -> None:
        """Remove everything at and below a key. What is published there ends with the first object that goes.

        Raises:
            InUseError: If a save or a removal is at work there.
        """
        is_file = self._client.head(final) is not None
        claimed = is_file or self._client.head(f"{final}/{MARK}") is not None or self.is_claimed(final)
        if not claimed:
            keys = sorted(self._client.walk(final), key=lambda key: not key.endswith(f"/{MARK}"))
            self._client.delete([key for key in keys if key.endswith(f"/{MARK}")])
            self._client.delete(keys)
            return

        claim = self._take(final, "removing")
        self.given_up.add(claim.token)  # if it fails, whoever tries next goes on
        self._client.delete([final if is_file else f"{final}/{MARK}"])
        self._wipe(final)
        self._client.delete([claim.key])

    def collect(self, final: str, older_than_s: float | None) -> Left | None:
        """Remove what an ended process left at a key, or put the mark that it did not come to put.

        Args:
            final: The key that is claimed.
            older_than_s: A claim of which the process cannot be asked is taken over once it is so old, by the
                server's clock; None if it never is.

        Returns:
            What was done; None if nothing was there.
        """
        there, found = self._client.read(final + CLAIM), self._client.head(final + CLAIM)
        if there is None or found is None:
            return None

        other, also = ClaimRecord.decode(there[0]), set[str]()
        if what_to_do(other, self.identity(), self.given_up) == "wait":
            if older_than_s is None or other.lives_here(self.identity()):
                return "kept"
            if self._age_s(final, found) < older_than_s:
                return "kept"

            also = {other.token}

        try:
            claim = self._take(final, "saving", also)
        except InUseError:  # somebody came meanwhile
            return "kept"

        self.given_up.add(claim.token)
        is_free = self._prepare(claim, final, None)
        self._client.delete([claim.key])
        return "removed" if is_free or claim.found != "committing" else "published"

    def _age_s(self, final: str, claim: Stat) -> float:
        """Return how long ago the server says that a claim was written."""
        probe = f"{final}{CLAIM}.probe"
        self._client.put(probe, b"what time is it?")
        now = self._client.head(probe)
        self._client.delete([probe])
        return 0.0 if now is None else (now.modified - claim.modified).total_seconds()

    def is_claimed(self, key: str) -> bool:
        """Whether somebody builds or removes there, or died while doing so."""
        return self._client.head(key + CLAIM) is not None

    def of(self, path: str) -> Build | None:
        """Return the save that builds at or above a path; None if none does."""
        return next((build for build in list(self.live.values()) if _is_within(path, build.place)), None)

    def _take(self, final: str, purpose: Purpose, also: Collection[str] = ()) -> Claim:
        """Claim a key, or take the claim over from a process that has ended, or whose token is in `also`."""
        mine, key, token = self.identity(), final + CLAIM, uuid.uuid4().hex
        if self._single_writer:
            self._try_conditions(f"{key}.probe", token.encode())

        record = ClaimRecord(token, purpose, mine)
        for _ in range(_TRIES):
            data = record.encode(mine)
            if self._client.create(key, data) != "other":
                self._check_conditions(final, key, data)
                found = self._client.head(key)
                return Claim(key, token, found and found.tag, "nothing")

            there = self._client.read(key)
            if there is None or there[1] is None:
                continue

            other = ClaimRecord.decode(there[0])
            step = what_to_do(other, mine, {*self.given_up, *also})
            if step == "wait":
                raise InUseError(self._client.path(final), self._told(other, key))
            if step == "finish" and purpose == "saving":  # what was about to be published never goes back
                data = ClaimRecord(token, "committing", mine, other.mark).encode(mine)

            tag = self._client.swap(key, data, there[1])
            if tag is not None:
                found_there: Found = "committing" if step == "finish" else "leftovers"
                return Claim(key, token, tag, found_there, other.mark)

        raise InUseError(self._client.path(final), "others claim it and give it up all the time")

    def _told(self, other: ClaimRecord, key: str) -> str:
        by = "an unknown process" if other.owner is None else str(other.owner)
        return f"it is claimed by {by}; if that has ended, remove {self._client.path(key)}"

    def _try_conditions(self, key: str, data: bytes) -> None:
        """Do without conditions if the server ignores them: the caller has said that there is one writer."""
        if not self._is_checked:
            self._client.put(key, data)
            self._client.uses_conditions = self._client.keeps_conditions(key, data)
            self._client.delete([key])
            self._is_checked = True

    def _check_conditions(self, final: str, key: str, data: bytes) -> None:
        """Try once, on an object that is ours, whether the server keeps to conditions at all."""
        if self._is_checked:
            return
        if not self._client.keeps_conditions(key, data):
            self._client.delete([key])
            path = self._client.path(final)
            raise UnsupportedByStoreError("save to", path, self._store, ConditionalWrites, _ADVICE)

        self._is_checked = True

    def _publish_file(self, build: Build, file: str) -> None:
        """Copy the one file to where it is published: of one object, that is one step."""
        self._change(build, "saving")  # it is still this save's
        if self._client.copy_if_absent(f"{build.prefix}/{file}", build.final) == "other":
            raise StorageError("publish", self._client.path(build.final), "is there already", errno.EEXIST)

        self._end(build)
        with suppress(StorageError):
            self._client.delete([*sorted(build.created), build.claim.key])

    def _change(self, build: Build, purpose: Purpose, mark: bytes = b"") -> None:
        if not self._swap(build.claim, purpose, mark):
            raise InUseError(self._client.path(build.final), "another process took this save over")

    def _swap(self, claim: Claim, purpose: Purpose, mark: bytes = b"") -> bool:
        """Say in the claim what it is for, if it is still ours."""
        if claim.tag is None:  # it was lost before
            return False

        mine = self.identity()
        data = ClaimRecord(claim.token, purpose, mine, mark).encode(mine)
        claim.tag = self._client.swap(claim.key, data, claim.tag)
        return claim.tag is not None

    def _is_published(self, final: str, file: str | None) -> bool:
        return self._client.head(final if file is not None else f"{final}/{MARK}") is not None

    def _end(self, build: Build) -> None:
        build.phase = "ended"
        self.live.pop(build.place, None)

    def identity(self) -> ProcessIdentity:
        """Return this process, which the claims name."""
        with self._lock:
            if self._mine is None:
                self._mine = ProcessIdentity.mine()

            return self._mine


def _is_within(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")
