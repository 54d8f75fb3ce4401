"""Procedures of a process: it begins, joins, agrees on, ends and forgets an operation by the service.

A procedure is a generator. It yields a call, is sent the answer, and returns what came of it. It has no
clock, keeps nothing and waits for nothing itself. So it is a pure function of the answers that it had: those
are its state, an answer is an event, and the next call is what it does then. `Job.perform` makes the calls;
tests/handlers/coordinators/test_interleavings.py makes them in every order, with processes that crash and
pause, and compares docs/reference/coordination.md with what it saw.

The order of calls within a procedure matters wherever a process may stop between two of them.
"""

from __future__ import annotations

__all__ = (
    "LOOK_BEATS",
    "MOST_KEPT",
    "Call",
    "Member",
    "Memory",
    "Procedure",
    "Verdict",
    "VerdictKind",
    "begin",
    "bring_all",
    "check_begun",
    "claim",
    "close",
    "come",
    "end",
    "find",
    "forget",
    "give_up",
    "look",
    "say",
    "verdict_of",
)

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast, final

from penstock.handlers.coordinators.job_options import JobLimits
from penstock.handlers.coordinators.operation_keys import (
    JOIN_FOLDER,
    JoinRecord,
    OperationKeys,
    join_folder,
    join_key,
    outcome_key,
)
from penstock.kernel.errors import (
    CoordinationError,
    OutcomeUnknownError,
    PeerError,
    PeerFailedError,
    PeerSilentError,
    PenstockError,
    PlansDifferError,
    StageFailedError,
)

VerdictKind: TypeAlias = Literal["commit", "failed", "silent", "differs", "unknown"]

# A verdict is one value of the service, and every process reads it: long texts are cut.
MOST_TEXT = 2000
MOST_DIFFERENCES = 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of an operation as one small value."""

    kind: VerdictKind
    process: int  #: who failed or differs; of a commit, the primary
    stage: str | None = None
    key_path: str | None = None
    text: str = ""
    seen: Mapping[int, str | None] = field(
        default_factory=dict[int, "str | None"]
    )  #: of those who are silent
    limit_s: float = 0.0
    differences: tuple[str, ...] = ()
    asked: Mapping[int, str] = field(default_factory=dict[int, str])  #: paths, by process, if they differ

    def encoded(self) -> bytes:
        """Return the value to store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Verdict:
        """Read what `encoded` made.

        Raises:
            CoordinationError: If something else is stored there.
        """
        try:
            fields = json.loads(data)
            fields["seen"] = {int(index): stage for index, stage in fields["seen"].items()}
            fields["differences"] = tuple(fields["differences"])
            fields["asked"] = {int(index): path for index, path in fields["asked"].items()}
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CoordinationError(
                f"{data[:80]!r} is no verdict: do all processes run one penstock?"
            ) from error

    def error(self) -> PeerError:
        """Return the error that every process but the one that failed raises. Not for a commit."""
        if self.kind == "silent":
            return PeerSilentError(self.seen, self.limit_s)
        if self.kind == "differs":
            return PlansDifferError(self.process, self.differences, self.asked)

        return PeerFailedError(self.process, self.stage, self.key_path, self.text)


def verdict_of(error: BaseException, process: int, stage: str) -> Verdict:
    """Return what tells the others that `error` ended this process's part.

    Args:
        error: A cancellation, or what was raised.
        process: The index of this one.
        stage: Where it was, if the error does not say.
    """
    if isinstance(error, PeerSilentError):
        return Verdict(kind="silent", process=process, seen=error.seen, limit_s=error.limit_s)
    if isinstance(error, OutcomeUnknownError):
        return Verdict(kind="unknown", process=process, stage=stage, text=error.reason[:MOST_TEXT])
    if isinstance(error, PlansDifferError):
        lines = tuple([line[:MOST_TEXT] for line in error.differences[:MOST_DIFFERENCES]])
        return Verdict(kind="differs", process=error.processes[0], differences=lines, asked=error.asked)
    if isinstance(error, PeerFailedError):
        return Verdict(
            kind="failed",
            process=error.processes[0],
            stage=error.peer_stage,
            key_path=error.key_path,
            text=error.reason,
        )
    if not isinstance(error, Exception):
        return Verdict(kind="failed", process=process, stage=stage, text="it was cancelled")

    at, key_path = stage, None
    if isinstance(error, PenstockError):
        at, key_path = error.stage or stage, error.key_path

    said: BaseException = error
    if isinstance(error, StageFailedError) and error.__cause__ is not None:
        said = error.__cause__  # the verdict has the stage already

    text = f"{type(said).__name__}: {said}"[:MOST_TEXT]
    return Verdict(kind="failed", process=process, stage=at, key_path=key_path, text=text)


T = TypeVar("T")

MOST_KEPT: Final = 4
"""Of how many operations that failed the keys are kept, for processes that have not come or not left; and of
how many that ended well, should one who took part not leave them."""

MOST_LEFT: Final = 64
"""How many operations a process remembers to have left. It may find one of them once more, just forgotten."""

LOOK_BEATS: Final = 4
"""So often, in beats, a process that the primary does not come to looks what that waits for instead."""


@final
@dataclass(frozen=True, slots=True)
class Member:
    """One process, and those that it does things together with."""

    index: int
    processes: Sequence[int]  #: who takes part, ascending; `index` is one of them
    group: str = ""  #: `processes`, with commas between them; empty for all of the job
    about: str = ""  #: tells these processes from others of the same job that they know nothing of
    limits: JobLimits = field(default_factory=JobLimits)
    n_kept: int = MOST_KEPT  #: of how many operations that are over the primary keeps the keys

    @property
    def count(self) -> int:
        """The number of processes that take part."""
        return len(self.processes)

    @property
    def primary(self) -> int:
        """The process that judges, merges and publishes: the first of them."""
        return self.processes[0]

    @property
    def is_primary(self) -> bool:
        """True if this process is the primary."""
        return self.index == self.primary

    def join_key(self, path: str) -> str:
        """Return the key that says which operation on `path` these processes are to join."""
        return join_key(path, self.about, self.group)

    def given_up_key(self, path: str) -> str:
        """Return the key that says that this process looked for one in vain."""
        return f"{self.join_key(path)}_given_up/{self.index}"


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """The operations of a process that it remembers, one after another. A value."""

    open: tuple[tuple[str, str], ...] = ()  #: the primary's that can be joined, by the key that says so
    ended: tuple[str, ...] = ()  #: the primary's that ended well, whose keys it deletes if nobody else has
    came: tuple[str, ...] = ()  #: to which this process has come
    left: tuple[str, ...] = ()  #: which it has left
    sought: tuple[str, ...] = ()  #: paths on which it looks for an operation
    given_up: tuple[str, ...] = ()  #: paths on which it looked for one in vain

    def opened(self, key: str, identity: str) -> Memory:
        """Note that an operation of the primary can be joined."""
        return replace(self, open=(*[each for each in self.open if each[0] != key], (key, identity)))

    def closed(self, key: str, identity: str) -> Memory:
        """Note that it cannot be joined any more."""
        return replace(self, open=tuple([each for each in self.open if each != (key, identity)]))


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One call of the service, or of the memory of this process.

    `put`, `wait`, `under`, `count` and `delete` are those of `KeyValues`; `by_process` is `under` by index.
    `sleep` waits for `limit_s`. `change` replaces what this process remembers. `enter` says which operation
    it is in, and `learn` which verdict holds there.
    """

    kind: Literal[
        "put", "wait", "under", "by_process", "count", "delete", "sleep", "change", "enter", "learn"
    ]
    key: str = ""
    value: Any = None
    replace: bool = False
    limit_s: float = 0.0


Procedure: TypeAlias = Generator[Call, Any, T]


def put(key: str, value: bytes, *, replace: bool = False) -> Procedure[bool]:
    """Store a value; return whether it was."""
    return cast("bool", (yield Call("put", key, value, replace)))


def wait(key: str, limit_s: float = 0.0) -> Procedure[bytes | None]:
    """Return a value once it is there; None if that takes longer."""
    return cast("bytes | None", (yield Call("wait", key, limit_s=limit_s)))


def by_process(prefix: str) -> Procedure[Mapping[int, bytes]]:
    """Return what each process said."""
    return cast("Mapping[int, bytes]", (yield Call("by_process", prefix)))


def count(key: str) -> Procedure[int]:
    """Count one more; return how many there are."""
    return cast("int", (yield Call("count", key)))


def delete(prefix: str) -> Procedure[None]:
    """Delete keys."""
    yield Call("delete", prefix)


def recall(change: Callable[[Memory], Memory] = lambda memory: memory) -> Procedure[Memory]:
    """Change the memory of this process; return the earlier value."""
    return cast("Memory", (yield Call("change", value=change)))


def come(member: Member, keys: OperationKeys, first: bytes) -> Procedure[bool]:
    """Say for the first time that this process is here; return whether it takes part from now on.

    Not if it was here before: an earlier Checkpointer of the process may have been, so the service is asked.
    Nor if this process left it, or all have forgotten it since its name was read.

    Args:
        member: This process.
        keys: Of the operation.
        first: The first heartbeat, which no other object sends. So the call may be made again if it was not
            confirmed in time.
    """
    if keys.identity in (yield from recall()).left:
        return False

    yield Call("enter", value=keys)  # from here on, who is cancelled has to say so to the others
    own = keys.each("at", member.index)
    is_here = (yield from put(own, first)) or (yield from wait(own)) == first
    if not is_here or (not member.is_primary and (yield from is_forgotten(keys, member.primary))):
        yield Call("enter", value=OperationKeys(""))
        return False

    yield from recall(lambda memory: replace(memory, came=(*memory.came, keys.identity)[-MOST_LEFT:]))
    return True


def is_forgotten(keys: OperationKeys, primary: int) -> Procedure[bool]:
    """Return whether an operation is forgotten; if so, delete the keys that this process set too late.

    The primary came before anybody could find it, and what it said goes last. Whatever a process says there
    without being sure of that, it looks afterwards: to look before would leave a moment in between.
    """
    if (yield from wait(keys.each("at", primary))) is not None:
        return False

    yield from delete(keys.all)
    return True


def begin(member: Member, path: str, keys: OperationKeys, first: bytes) -> Procedure[None]:
    """Announce an operation on `path` for the others to join. Called by the primary."""
    key = member.join_key(path)
    yield from recall(lambda memory: memory.opened(key, keys.identity))
    # The key of the primary comes first and goes last: that is how others know if all was forgotten.
    yield from come(member, keys, first)  # before anybody can find it: see `is_forgotten`
    yield from put(key, JoinRecord(keys.identity, member.group, member.about, path).encoded(), replace=True)


def find(member: Member, path: str, first: bytes) -> Procedure[OperationKeys]:
    """Return the operation on `path` that the primary has begun, once this process has come to it.

    It waits as long as it takes; `Memory.sought` has the path for so long. For the others.

    Raises:
        PlansDifferError: If others have another list of those that take part, or ask for something else.
    """
    seen: frozenset[str] = frozenset()
    if path in (yield from recall()).given_up:
        yield from delete(member.given_up_key(path))
        yield from recall(lambda memory: replace(memory, given_up=_without(memory.given_up, path)))

    while True:
        found = yield from wait(member.join_key(path), LOOK_BEATS * member.limits.beat_s)
        if found is None:
            seen = yield from look(member, path, seen)
            continue

        keys = OperationKeys(JoinRecord.decoded(found).identity)
        if (yield from come(member, keys, first)):
            return keys

        # One that failed, which this process has left: the primary has not begun the next.
        yield Call("sleep", limit_s=member.limits.beat_s)


def _without(paths: tuple[str, ...], path: str) -> tuple[str, ...]:
    return tuple([each for each in paths if each != path])


def give_up(member: Member, path: str) -> Procedure[None]:
    """Say that this process looks for an operation no more: the primary, if it begins one, has come too late.

    It would blame those who waited for it. For the others.
    """
    yield from recall(lambda memory: replace(memory, given_up=(*_without(memory.given_up, path), path)))
    note = JoinRecord("", member.group, member.about, path)
    yield from put(member.given_up_key(path), note.encoded(), replace=True)
    begun = yield from wait(member.join_key(path))
    if begun is not None:  # just now: it may have looked for this note before that was there
        keys = OperationKeys(JoinRecord.decoded(begun).identity)
        if keys.identity not in (yield from recall()).left:
            error = PeerSilentError({member.primary: None}, member.limits.patience_s)
            yield from _tell_others(keys, verdict_of(error, member.index, "join"), member.primary)


def look(
    member: Member, path: str, seen: frozenset[str] = frozenset(), asked: str | None = None
) -> Procedure[frozenset[str]]:
    """Look whether the processes wait for each other in vain, since they were not asked for the same.

    The primary waits in an operation for this process, and this process waits for the primary elsewhere. A
    process that lags is in none, and one that is ahead has come to what the primary waits in. Two looks
    must see it: between them, what was begun a moment ago is found.

    Args:
        member: This process.
        path: What it looks for.
        seen: What the look before returned.
        asked: What it looks for, in words; `path` if None.

    Returns:
        The operations that wait for this process.

    Raises:
        PlansDifferError: If that is so. The others in that operation hear it, too.
    """
    joinings = yield from _joinings(JOIN_FOLDER)
    yield from _check_groups(member, path, joinings)
    memory = yield from recall()
    known = {*memory.came, *memory.left}
    waiting = {
        each.identity: each
        for each in joinings
        if (each.group, each.about) == (member.group, member.about)
        and each.path not in memory.sought
        and each.identity
        and each.identity not in known
    }
    # Found in two looks in a row: one look alone may meet an operation that this process is about to join.
    for identity in sorted(seen & waiting.keys()):
        keys, theirs = OperationKeys(identity), waiting[identity].path
        said = yield from wait(keys.verdict)
        own = {member.index: path if asked is None else asked}
        if said is not None:
            verdict = Verdict.decoded(said)
            # It failed, and is kept for those who come late. If it failed since two were asked for different
            # things, this one, which it waited for, is asked for a third: the primary comes to none of them.
            if verdict.asked:
                yield from _note_left(keys)
                raise PlansDifferError.of_paths(verdict.process, {**verdict.asked, **own})

            continue

        there = yield from by_process(keys.each("at"))
        error = PlansDifferError.of_paths(member.index, {**dict.fromkeys(there, theirs), **own})
        yield from _tell_others(keys, verdict_of(error, member.index, "join"), member.primary)
        raise error

    return frozenset(waiting)


def _note_left(keys: OperationKeys) -> Procedure[None]:
    """Note that this process comes to an operation no more: it knows how that ended."""
    yield from recall(lambda memory: replace(memory, left=(*memory.left, keys.identity)[-MOST_LEFT:]))


def _tell_others(keys: OperationKeys, verdict: Verdict, primary: int) -> Procedure[None]:
    """End an operation that this process is not in, unless it has ended."""
    yield from _note_left(keys)
    # Set if there is none: the first verdict holds for all, so no barrier is needed.
    if (yield from put(keys.verdict, verdict.encoded())):
        yield from is_forgotten(keys, primary)


def check_begun(member: Member, path: str) -> Procedure[None]:
    """Look whether the others can come to what the primary has just begun. The primary's.

    Raises:
        PlansDifferError: If others have another list of those that take part.
        PeerSilentError: If others have given up to wait for the primary.
    """
    joinings = yield from _joinings(join_folder(path, member.about))
    yield from _check_groups(member, path, joinings)
    if any(not each.identity and each.group == member.group for each in joinings):
        yield from delete(f"{member.join_key(path)}_given_up/")
        raise PeerSilentError({member.primary: None}, member.limits.patience_s)


def _check_groups(member: Member, path: str, joinings: Sequence[JoinRecord]) -> Procedure[None]:
    """Look for operations of other groups of processes that overlap with this one's.

    They hear of it, since they would wait for processes that do not come. Groups that share none
    know nothing of each other.
    """
    for found in joinings:
        is_other = (found.path, found.about) != (path, member.about) or found.group == member.group
        if is_other or not found.identity or not found.shares_processes(member.processes):
            continue

        theirs, own = (
            f"[{group.replace(',', ', ')}]" if group else "all" for group in (found.group, member.group)
        )
        line = f"option active_processes: others have {theirs}, process {member.index} has {own}"
        error = PlansDifferError(member.index, (line,))
        verdict = verdict_of(error, member.index, "join")
        yield from _tell_others(OperationKeys(found.identity), verdict, found.primary)
        raise error


def _joinings(prefix: str) -> Procedure[Sequence[JoinRecord]]:
    found = cast("Mapping[str, bytes]", (yield Call("under", prefix)))
    return [JoinRecord.decoded(found[key]) for key in sorted(found)]


def say(member: Member, keys: OperationKeys, what: str, data: bytes) -> Procedure[None]:
    """Say something, unless this process has said it; the last of the others says that all have."""
    is_new = yield from put(keys.each(what, member.index), data)
    if is_new and (yield from count(keys.counter(what))) == member.count - 1:
        yield from put(keys.here(what), b"1")


def bring_all(keys: OperationKeys, what: str, limit_s: float) -> Procedure[Mapping[int, bytes]]:
    """Return the messages of the others: of all, or of those that came within `limit_s`."""
    yield from wait(keys.here(what), limit_s)
    return (yield from by_process(keys.each(what)))


def close(member: Member, path: str, keys: OperationKeys) -> Procedure[None]:
    """Take back what says that an operation can be joined: all have come. The primary's.

    Before the others write. If it stayed, it could be that of the next save to this path.
    """
    key = member.join_key(path)
    # So that no other process joins any more: all have come.
    yield from delete(key)
    yield from recall(lambda memory: memory.closed(key, keys.identity))


def claim(member: Member, keys: OperationKeys, verdict: Verdict) -> Procedure[Verdict | None]:
    """Set the verdict unless there is one; return the one that holds. None if all is forgotten."""
    if (yield from put(keys.verdict, verdict.encoded())):
        if not member.is_primary and (yield from is_forgotten(keys, member.primary)):
            return None

        yield Call("learn", value=verdict)
        return verdict

    found = yield from wait(keys.verdict)
    if found is None:
        return None

    standing = Verdict.decoded(found)
    yield Call("learn", value=standing)
    return standing


def end(
    member: Member,
    path: str,
    keys: OperationKeys,
    failure: Verdict | None,
    standing: Verdict | None,
    *,
    is_local: bool,
    has_begun: bool,
    is_closed: bool,
) -> Procedure[None]:
    """Leave an operation; tell the others how this process ended, if it failed.

    The primary waits until all others have left what failed, if they all came: it is about to remove what
    they write, and the keys.

    Args:
        member: This process.
        path: What the operation is about.
        keys: Of it.
        failure: What the others are to hear; None if all went well here.
        standing: The verdict, if it is known here.
        is_local: Whether each process publishes on its own disk.
        has_begun: Whether the primary has let the others write.
        is_closed: Whether this process knows that no other can join any more.
    """
    yield from _note_left(keys)
    if failure is not None:
        standing = standing or (yield from claim(member, keys, failure))
        if standing is None:
            return
        if standing.kind == "commit":  # all know that it was to be published
            if member.is_primary:
                yield from put(keys.result, failure.encoded())
            elif is_local:  # unless it has published
                yield from say(member, keys, "done", failure.encoded())

    failed = failure is not None and standing is not None and standing.kind != "commit"
    if failed and member.is_primary and (has_begun or (yield from _all_came(member, keys))):
        # One that is silent will not come; those that live need no more than a moment.
        is_silence = standing is not None and standing.kind == "silent"
        yield from wait(keys.here("left"), member.limits.beat_s if is_silence else member.limits.call_s)

    yield from _leave(member, path, keys, failed=failed, is_closed=is_closed)


def _all_came(member: Member, keys: OperationKeys) -> Procedure[bool]:
    return len((yield from by_process(keys.each("at")))) == member.count


def _leave(
    member: Member, path: str, keys: OperationKeys, *, failed: bool, is_closed: bool
) -> Procedure[None]:
    """Forget the keys that are not needed any more: the last one to leave those of this operation."""
    n_left = yield from count(keys.left)
    if failed and not member.is_primary and n_left == member.count - 1:
        yield from put(keys.here("left"), b"1")
    if failed and not member.is_primary and (yield from is_forgotten(keys, member.primary)):
        return  # the primary waited no longer, and was the last, or has had other failures since

    if n_left == member.count and (member.is_primary or is_closed):
        yield from forget(member, keys.identity, path if member.is_primary and not is_closed else None)
    elif member.is_primary and failed:
        yield from _keep_outcome(member, keys.identity, path)
    elif member.is_primary:
        before = yield from recall(
            lambda memory: replace(memory, ended=(*memory.ended, keys.identity)[-member.n_kept :])
        )
        if len(before.ended) == member.n_kept:
            yield from forget(member, before.ended[0])


def _keep_outcome(member: Member, identity: str, path: str) -> Procedure[None]:
    """Keep the keys of an operation until as many others have failed after it. The primary's.

    The service itself knows which are kept: operations fail in one Checkpointer after another, each of which
    is closed before the late ones come.
    """
    # A ring of keys in the service: what is kept of failures is bounded, however many there are.
    number = yield from count(outcome_key(member.index))
    key = outcome_key(member.index, number % member.n_kept)
    oldest = yield from wait(key)
    yield from put(key, f"{identity} {path}".encode("utf-8", "surrogateescape"), replace=True)
    if oldest is not None:
        old_identity, _, old_path = oldest.decode("utf-8", "surrogateescape").partition(" ")
        yield from forget(member, old_identity, old_path)


def forget(member: Member, identity: str, path: str | None = None) -> Procedure[None]:
    """Delete all keys of an operation, and the key by which it is joined, if that is still its own.

    Args:
        member: This process.
        identity: Of the operation.
        path: What it is about, if something may say that it is to be joined. The primary's.
    """
    if path is not None:
        yield from _take_back(member, identity, path)

    yield from delete(OperationKeys(identity).all)


def _take_back(member: Member, identity: str, path: str) -> Procedure[None]:
    key = member.join_key(path)
    said = yield from wait(key)
    if said is not None and JoinRecord.decoded(said).identity == identity:
        yield from delete(key)

    memory = yield from recall(lambda memory: memory.closed(key, identity))
    now = dict(memory.open).get(key)
    if now is not None and now != identity:  # begun meanwhile, by the next save to that path
        yield from put(key, JoinRecord(now, member.group, member.about, path).encoded(), replace=True)
