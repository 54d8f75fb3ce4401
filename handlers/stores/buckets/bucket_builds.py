"""The saves that build in a bucket: how each claims its path, publishes, and undoes what it wrote.

Nothing in a bucket is renamed. A save claims the path by an object next to it that one process alone can
create, writes every object where it will stay, and puts the mark last. A prefix without a mark is no
checkpoint for anybody, claimed or not.

The page "Commits in a bucket" of docs/design tells what each step is for.
"""

from __future__ import annotations

__all__ = ("MARK", "Build", "Builds", "Left", "marked_folders", "staging")

import errno
import uuid
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Final, Literal, TypeAlias, final

from penstock.handlers.stores.buckets.bucket_claims import CLAIM, ClaimRecord, Claims, ObjectClaim
from penstock.handlers.stores.buckets.objects import Created, Objects
from penstock.kernel.errors import (
    AccessDeniedError,
    ClaimLostError,
    InUseError,
    OutcomeUnknownError,
    StorageError,
)
from penstock.kernel.protocols.stores import Hold

MARK: Final = "commit_success.txt"
"""Publishes the prefix that it is in. Orbax looks for this name in buckets, too."""

_STAGED: Final = ".d"
"""Ends the prefix in which is what a save is not done with: a single file until it is copied to where it is
published, and what long files are made of."""

_TRIES: Final = 4
"""The claim may change while it is looked at."""

_AT_ONCE: Final = 1000
"""Keys that one request deletes. Between two requests a claim is renewed."""

Left: TypeAlias = Literal["removed", "published", "kept"]
"""What became of what a process left: `kept` if it may be at work."""


@final
@dataclass(slots=True)
class Build:
    """One save that builds. Thread-safe."""

    final: str  #: the key that will be published
    place: str  #: the path to build at, by which the store knows it
    file: str | None  #: the one file at the place that becomes `final`
    claim: ObjectClaim
    phase: Literal["building", "committing", "ended"] = "building"
    mark: bytes | None = None  #: what the save wrote as its mark, kept back until it is published
    created: set[str] = field(default_factory=set[str])  #: keys whose objects are this save's
    met: set[str] = field(default_factory=set[str])  #: keys with the right content that it may not own
    lock: Lock = field(default_factory=Lock)
    is_shared: bool = False  #: whether several processes write into it
    is_joined: bool = False  #: whether another process holds its claim

    @property
    def prefix(self) -> str:
        """The beginning of the keys of its objects."""
        return self.final if self.file is None else self.staging

    @property
    def staging(self) -> str:
        """The beginning of the keys of objects that will not be published. No other save has it."""
        return staging(self.final, self.claim.token)

    def published_mark(self) -> bytes:
        """Return the content of the mark. It names the save, so that no two marks are equal."""
        said = (self.mark or b"").rstrip()
        return (said + b"\n" if said else b"") + f"published by {self.claim.token}\n".encode()


def staging(final: str, token: str) -> str:
    """Return the prefix of the unpublished objects of a save to `final`."""
    return f"{final}{CLAIM}{_STAGED}/{token}"


@final
class _RootHold(Hold):
    """The hold of a manager on its directory of steps."""

    __slots__ = ("_builds", "_claim")

    def __init__(self, builds: Builds, claim: ObjectClaim) -> None:
        self._builds, self._claim = builds, claim

    def confirm(self) -> None:
        self._builds.claims.change(self._claim, "holding")

    def release(self) -> None:
        held = self._builds.holds.pop(self._claim.token, None)
        if held is not None:
            self._builds.drop(held, asks=True)


@final
class Builds:
    """Builds, publishes, removes and undoes, for one store. Every method blocks; thread-safe.

    Args:
        client: Of the bucket.
        claims: Of the same.
    """

    __slots__ = ("_client", "_unfinished", "_working", "claims", "holds", "live")

    def __init__(self, client: Objects, claims: Claims) -> None:
        self._client, self.claims = client, claims
        self._unfinished: set[str] = set()  # keys of claims that could not be dropped yet
        self._working: dict[str, ObjectClaim] = {}  # of removals and collections under way, by token
        self.live: dict[str, Build] = {}  #: by place
        self.holds: dict[str, ObjectClaim] = {}  #: on directories of steps, by token

    # Saves of one process.

    def begin(self, final: str, place: str, file: str | None) -> Build:
        """Claim a key for a save. Remains of an ended process are removed, or published if they are whole.

        Raises:
            InUseError: If another save or removal claims it.
            ClaimLostError: If another manager holds the directory of steps by now.
            StorageError: With `errno.EEXIST` if something is published there.
            UnsupportedByStoreError: If the server does not keep to conditions.
        """
        self._check_holds(final)
        claim = self.claims.take(final, "saving")
        with self._at_work(claim):
            is_free = self._prepare(claim, final, file)

        if not is_free:
            self.drop(claim)
            raise StorageError("save", self._client.path(final), "is there already", errno.EEXIST)

        build = self.live[place] = Build(final, place, file, claim)
        return build

    def _prepare(self, claim: ObjectClaim, final: str, file: str | None) -> bool:
        """Publish a complete save whose process died, or remove its objects. Return if the key is free."""
        # All objects were there when it died, and what was about to be published never goes back.
        if claim.found == "committing":
            self._client.create(f"{final}/{MARK}", claim.mark)
        if self._is_published(final, file):
            return False
        if claim.found == "leftovers":
            self._wipe(claim)

        return True

    def _wipe(self, claim: ObjectClaim) -> None:
        for prefix in (claim.final, f"{claim.final}{CLAIM}{_STAGED}"):
            self._delete(claim, list(self._client.walk(prefix)))

    def _delete(self, claim: ObjectClaim, keys: Sequence[str]) -> None:
        """Delete objects under a claim.

        Raises:
            ClaimLostError: If another process took it over. What is left there is that one's.
        """
        for at in range(0, len(keys), _AT_ONCE):
            # A deletion may take long: without the claim, another save may write here by now.
            self.claims.keep(claim)
            self._client.delete(keys[at : at + _AT_ONCE])

    def create(self, build: Build, key: str, data: bytes | memoryview) -> Created:
        """Create an object of a save, or replace one that the save itself created.

        Raises:
            ClaimLostError: If the save is known to have lost its claim.
        """
        self.keep(build)
        with build.lock:
            # The condition "if absent" is for what others may have put there. What this save put, it may
            # replace.
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

    def keep(self, build: Build) -> None:
        """Renew the claim of a build if it is due. Not of another process's, which does so itself."""
        if not build.is_joined:
            self.claims.keep(build.claim)

    def publish(self, build: Build) -> None:
        """Make visible what was built, if the claim is still this save's.

        Raises:
            ClaimLostError: If somebody took it over, or the hold on the directory of steps.
            StorageError: With `errno.EEXIST` if something is published there; or if the server refuses.
            OutcomeUnknownError: If it is not known whether the mark is there.
        """
        self._check_holds(build.final)
        if self._is_published(build.final, build.file):
            raise StorageError("publish", self._client.path(build.final), "is there already", errno.EEXIST)
        if build.file is not None:
            self._publish_file(build, build.file)
            return

        mark = build.published_mark()
        # First the claim says so, then the mark is put: if this process dies between the two, the next one
        # to come puts the same mark.
        self.claims.change(build.claim, "committing", mark)
        build.phase = "committing"
        try:
            created = self._client.create(f"{build.final}/{MARK}", mark)
        except AccessDeniedError:
            self._back(build)
            raise
        except StorageError as error:
            self._end(build)
            self._give_up(build.claim)
            said = f"its mark could not be put ({error.problem}), and the next save to it puts it"
            raise OutcomeUnknownError(self._client.path(build.final), said) from error

        if created == "other":
            self._back(build)
            raise StorageError("publish", self._client.path(build.final), "is there already", errno.EEXIST)
        # A process that was paused wakes with a lease that may be over: the mark may come too late.
        if created == "created" and self.claims.is_due(build.claim):
            self._check_not_late(build, mark)

        self._end(build)
        self.drop(build.claim)  # if that fails, it is published all the same

    def _back(self, build: Build) -> None:
        """Take back that the mark comes next: it is known that this process did not put it."""
        self.claims.change(build.claim, "saving")
        build.phase = "building"

    def _check_not_late(self, build: Build, mark: bytes) -> None:
        """Remove the mark again if this process was stopped before it put it, and the save is past.

        Somebody may have published for it, and deleted that since: then the mark is there alone.

        Raises:
            ClaimLostError: If so.
        """
        if self.claims.swap(build.claim, "committing", mark):
            return

        there = self._client.read(build.claim.key)
        if there is None or ClaimRecord.decode(there.data).mark != mark:  # else he publishes it just now
            self._end(build)
            self._client.delete([f"{build.final}/{MARK}"])
            self.claims.check(build.claim)

    def drop(self, claim: ObjectClaim, *, asks: bool = False) -> None:
        """Delete a claim. If the server does not, that is tried again, and the next one takes it over."""
        try:
            self.claims.drop(claim, asks=asks)
        except StorageError:
            self._give_up(claim)

    @contextmanager
    def _at_work(self, claim: ObjectClaim) -> Generator[None]:
        """Renew a claim while its work is done. If the work fails, the next holder goes on from there."""
        self._working[claim.token] = claim
        try:
            yield
        except BaseException:
            self._give_up(claim)
            raise
        finally:
            del self._working[claim.token]

    def _give_up(self, claim: ObjectClaim) -> None:
        """Let this process, or the next one, go on from a claim whose work could not be finished."""
        self.claims.me.let_go(claim.token)
        self._unfinished.add(claim.final)

    def _publish_file(self, build: Build, file: str) -> None:
        """Copy the one file to its final key: of one object, that is one step."""
        self.claims.change(build.claim, "saving")  # it is still this save's
        if self._client.copy_if_absent(f"{build.prefix}/{file}", build.final) == "other":
            raise StorageError("publish", self._client.path(build.final), "is there already", errno.EEXIST)

        self._end(build)
        try:
            self._client.delete(sorted(build.created))  # under keys that no other save has
        except StorageError:
            self._give_up(build.claim)
        else:
            self.drop(build.claim)

    def discard(self, build: Build) -> None:
        """Remove the objects that a save created, unless it is published or somebody took its claim over.

        An object that it may not own stays, and so does the claim: it hides the object until the next save.
        """
        if build.phase == "building":
            self._end(build)
            if build.is_joined:
                return  # its owner removes it
            try:
                self._undo(build)
            except StorageError:
                self._give_up(build.claim)
                raise

    def _undo(self, build: Build) -> None:
        if not self.claims.swap(build.claim, "removing"):
            return
        if build.is_shared:  # one of the processes that is stopped may still write: the claim stays
            self._wipe(build.claim)
        else:
            self._delete(build.claim, sorted(build.created))

        if build.is_shared or build.met:
            self.claims.swap(build.claim, "left")
        else:
            self.claims.drop(build.claim)

    def _is_published(self, final: str, file: str | None) -> bool:
        return self._client.head(final if file is not None else f"{final}/{MARK}") is not None

    def _end(self, build: Build) -> None:
        """Forget a build. Its claim, if it stays, binds this process no more."""
        build.phase = "ended"
        self.live.pop(build.place, None)
        if not build.is_joined:
            self.claims.me.let_go(build.claim.token)

    # Saves of several processes. The one that began it holds the claim, publishes, and removes what all
    # wrote. The others know the claim by its token.

    def share(self, build: Build) -> str:
        """Let other processes write into a build. Returns its new place, which tells them the claim."""
        del self.live[build.place]
        build.place, build.is_shared = f"{build.place}/{build.claim.token}", True
        self.live[build.place] = build
        return build.place

    def join(self, final: str, place: str) -> Build:
        """Write into what another process began at a place."""
        claim = ObjectClaim(final, place.rsplit("/", 1)[-1])
        probe = uuid.uuid4().hex  # other processes try at the same time
        self.claims.try_conditions(f"{claim.key}.probe-{probe}", probe.encode())
        build = self.live[place] = Build(final, place, None, claim, is_shared=True, is_joined=True)
        return build

    def is_current(self, build: Build) -> bool:
        """True if a save that this process may have joined still claims its path.

        Raises:
            StorageError: If the server does not say.
        """
        there = self._client.read(build.claim.key)
        if there is None:
            return False

        record = ClaimRecord.decode(there.data)
        return record.token == build.claim.token and record.purpose in ("saving", "committing")

    def take_back(self, build: Build) -> bool:
        """Give the claim up for the process that holds it, and is silent.

        The owner swaps its claim before it puts the mark. So of two swaps the first decides, without a word
        to anybody: this one, or that of the owner when it wakes.

        Returns:
            Whether it is sure that the owner publishes nothing any more.

        Raises:
            StorageError: If the server does not say.
        """
        me = self.claims.me
        for _ in range(_TRIES):
            there = self._client.read(build.claim.key)
            if there is None or there.tag is None:
                return False  # it was published, or removed

            record = ClaimRecord.decode(there.data)
            if record.token != build.claim.token or record.purpose == "committing":
                return False
            if record.purpose != "saving":
                return True  # somebody else was faster, or the owner itself gave it up

            data = ClaimRecord(record.token, "left", me.identity, process=me.key).encode(me.identity)
            if self._client.swap(build.claim.key, data, there.tag) is not None:
                return True

        return False

    # What is renewed while it lasts.

    def hold(self, root: str) -> _RootHold:
        """Hold a directory of steps, until it is released or not renewed in time.

        Raises:
            InUseError: If another manager holds it.
        """
        claim = self.claims.take(root, "holding")
        self.holds[claim.token] = claim
        return _RootHold(self, claim)

    def renew(self) -> None:
        """Renew every claim that is held here, and finish what could not be finished before.

        A server that does not answer is asked again with the next call.
        """
        builds = [build.claim for build in list(self.live.values()) if not build.is_joined]
        for claim in (*builds, *list(self._working.values()), *list(self.holds.values())):
            self.claims.renew(claim)

        for key in list(self._unfinished):
            with suppress(StorageError):
                self.collect(key, None)
                self._unfinished.discard(key)

    def _check_holds(self, final: str, *, asks: bool = False) -> None:
        """Raise `ClaimLostError` if this process held the directory of steps above a key, and lost it.

        Args:
            final: The key.
            asks: Whether the server is asked, even if the hold was renewed just now.
        """
        lost: ClaimLostError | None = None
        for hold in list(self.holds.values()):
            if _is_within(final, hold.final.rpartition("/")[0]):
                try:
                    if asks:
                        self.claims.change(hold, "holding")
                    else:
                        self.claims.keep(hold)
                except ClaimLostError as error:
                    lost = error
                else:
                    return  # of two managers in this process one may have taken it from the other

        if lost is not None:
            raise lost

    # Removal.

    def remove(self, final: str) -> None:
        """Remove everything at and below a key. The mark goes first, so that no reader sees a part.

        Raises:
            InUseError: If a save or a removal is at work there.
            ClaimLostError: If another process took it over meanwhile, or the directory of steps.
        """
        self._check_holds(final, asks=True)  # what goes does not come back
        is_file = self._client.head(final) is not None
        if not (is_file or self._client.has_below(final) or self.claims.is_claimed(final)):
            return

        claim = self.claims.take(final, "removing")
        with self._at_work(claim):
            self._delete(claim, [final if is_file else f"{final}/{MARK}"])
            keys = list(self._client.walk(final))
            self._delete(claim, [key for key in keys if key.endswith(f"/{MARK}")])
            self._wipe(claim)

        self.drop(claim)

    def collect(self, final: str, older_than_s: float | None) -> Left | None:
        """Remove what an ended process left at a key, or put the mark that it did not come to put.

        Args:
            final: The key that is claimed.
            older_than_s: A claim of which the process cannot be asked is over once it is so old, by the
                server's clock, even if its lease is longer.

        Returns:
            What was done; None if nothing was there.
        """
        there = self._client.read(final + CLAIM)
        if there is None:
            return None
        if ClaimRecord.decode(there.data).is_held_by(self.claims.me):
            return "kept"

        try:
            claim = self.claims.take(final, "saving", older_than_s)
        except InUseError:
            return "kept"

        try:
            with self._at_work(claim):
                is_free = self._prepare(claim, final, None)
        except ClaimLostError:
            return "kept"

        self.drop(claim)
        return "removed" if is_free or claim.found != "committing" else "published"

    def is_unmarked(self, final: str) -> bool:
        """True if something is below a key that is not claimed, and that neither is nor holds a checkpoint.

        That is an interrupted copy, or a save whose claim somebody removed. Items of a step have marks, too;
        right below the key, and named otherwise than a step is, they make no checkpoint of it.
        """
        if self._is_published(final, None):
            return False

        is_there = False
        for key in self._client.walk(final):
            *above, name = key[len(final) + 1 :].split("/")
            if name == MARK and (len(above) != 1 or above[0][-1:].isdigit()):
                return False

            is_there = True

        return is_there and not self.claims.is_claimed(final)

    def of(self, path: str) -> Build | None:
        """Return the save that builds at or above a path; None if none does."""
        return next((build for build in list(self.live.values()) if _is_within(path, build.place)), None)


_PAGES: Final = 2000
"""Keys that two requests list. A directory of steps that has no more is known by them."""


def marked_folders(client: Objects, prefix: str, among: Collection[str] | None = None) -> list[str]:
    """Return the names of the prefixes right below one that have a mark. Blocking.

    Args:
        client: Of the bucket.
        prefix: The prefix above; empty for the bucket.
        among: Look at these alone.
    """
    at = f"{prefix}/" if prefix else ""
    found = set[str]()
    if among is None or len(among) > 2:
        keys = list(islice(client.walk(prefix), _PAGES))
        split = [key[len(at) :].split("/") for key in keys]
        found = {parts[0] for parts in split if len(parts) == 2 and parts[1] == MARK}
        if len(keys) < _PAGES:
            return sorted(found if among is None else found.intersection(among))

    names = client.list(prefix).folders if among is None else among
    asked = [name for name in names if name not in found and CLAIM not in name]
    found |= {name for name in asked if client.head(f"{at}{name}/{MARK}") is not None}
    return sorted(found.intersection(names))


def _is_within(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/") or not place
