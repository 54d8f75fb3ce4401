"""Explores what three processes do in every order of their steps, with the procedures that the library runs.

A process is the answers that its procedures have had (see `procedures`), and what `Membership` knows of the
operation. A step makes one call of the service, and what follows from its answer. One process may be paused
once and one may crash, anywhere. A state that was seen before is not looked at again.

Time passes only when no process that is awake has a step left: who is healthy is fast, compared with the
limits. So a pause is long or short, as it comes. With each beat, all that are awake send heartbeats, hear
those of others, and judge. Who wakes may have an answer that it asked for before, and may send a heartbeat
before anything else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from penstock.config import JobLimits
from penstock.errors import (
    CoordinationError,
    OutcomeUnknownError,
    PeerSilentError,
    PenstockError,
    StorageError,
)
from penstock.handlers.coordinators import procedures
from penstock.handlers.coordinators.operation_keys import OperationKeys
from penstock.handlers.coordinators.procedures import Call, Member, Memory, Procedure, Verdict, verdict_of
from penstock.handlers.coordinators.silence import LATER, AwakeLimit, FailureDetector, Heartbeat

COUNT = 3
LIMITS = JobLimits(join_s=8.0, write_s=8.0, silence_s=3.0, beat_s=1.0, call_s=2.0)
LONGEST_S = 400.0
"""So much time never passes: every wait has a limit."""

PUBLISHED = b"published"
PATH = "/run/step"


class Used(NamedTuple):
    """Procedures that a mutant may take the place of."""

    begin: Any = procedures.begin
    claim: Any = procedures.claim
    end: Any = procedures.end


@dataclass(frozen=True)
class Scenario:
    """What may happen."""

    pauses: int | None = None  #: who may be paused, once, anywhere
    crashes: int | None = None  #: who may crash, anywhere
    fails: int | None = None  #: who fails in its first save, in the middle of it
    with_service: bool = False  #: whether the service stands still with process 0
    longest_s: float = float("inf")  #: of a pause; jax ends a job whose service is away for 100 s
    n_saves: int = 1
    is_one_path: bool = True  #: whether all saves are to one path
    paths: Mapping[int, str] = field(default_factory=dict[int, str])  #: what each asks for, if not `PATH`
    used: Used = Used()  # noqa: RUF009  # it is a tuple

    @property
    def suspects(self) -> set[int]:
        """Who may be named."""
        return {who for who in (self.pauses, self.crashes) if who is not None}


class Process(NamedTuple):
    """One process: where it is in its saves, and what it knows."""

    rank: int
    n_save: int = 0
    phase: str = "body"  #: or `give up`, `end`, `done`
    life: str = "awake"  #: or `paused`, or `crashed`
    paused_s: float = -1.0  #: when it was paused
    answers: tuple[Any, ...] = ()
    flags: frozenset[str] = frozenset()  #: `in`, `has_begun`, `is_closed`, `has_brought`, `has_all`
    identity: str = ""
    memory: Memory = Memory()
    verdict: bytes | None = None
    failure: tuple[str, bytes] | None = None  #: the error that it ends with: its name, and the verdict of it
    waits: AwakeLimit | None = None  #: of the call under way
    scope: AwakeLimit | None = None  #: of the procedure under way
    detector: FailureDetector | None = None
    results: tuple[str, ...] = ()

    @property
    def member(self) -> Member:
        """As the library sees it."""
        return Member(self.rank, range(COUNT), limits=LIMITS, n_kept=1)


Service: TypeAlias = "dict[str, bytes]"
Row: TypeAlias = tuple[str, str, str, str]


class World(NamedTuple):
    """All of it, at one moment."""

    now: float
    service: Service
    processes: tuple[Process, ...]
    facts: frozenset[tuple[str, str, str]]  #: what was published and decided
    late: tuple[tuple[str, bytes], ...] = ()  #: puts that were given up, and may take effect or not


class BrokenPromiseError(AssertionError):
    """What may not happen did."""


def _primary(used: Used, member: Member, path: str, identity: str) -> Generator[Call, Any, str]:
    """Do what the primary does in a save, in the order of `JointOperation`."""
    keys = OperationKeys(identity)
    yield from used.begin(member, path, keys, b"first")
    yield from procedures.check_begun(member, path)
    yield _flag("in")
    plans = yield from procedures.bring_all(keys, "plan", LIMITS.join_s)
    _check_all(member, plans, LIMITS.join_s)
    yield from procedures.close(member, path, keys)
    yield _flag("is_closed")
    yield _flag("has_begun")
    yield from procedures.put(keys.go, b"go")
    yield _flag("works")
    parts = yield from procedures.bring_all(keys, "part", LIMITS.write_s)
    _check_all(member, parts, LIMITS.write_s)
    yield _flag("has_all")
    standing = yield from used.claim(member, keys, Verdict(kind="commit", process=member.index))
    if standing is None:
        raise CoordinationError("no answer")
    if standing.kind != "commit":
        raise standing.error()

    yield Call("learn", "publish", identity)
    yield from procedures.put(keys.result, PUBLISHED)
    return "saved"


def _other(_: Used, member: Member, path: str, __: str) -> Generator[Call, Any, str]:
    """Do what all others do."""
    keys = yield from procedures.find(member, path, b"first")
    yield _flag("in")
    yield from procedures.say(member, keys, "plan", b"plan")
    if (yield from procedures.wait(keys.go, LIMITS.patience_s)) is None:
        raise PeerSilentError({member.primary: "join"}, LIMITS.patience_s)

    yield _flag("is_closed")
    yield _flag("works")
    yield _flag("has_brought")
    yield from procedures.say(member, keys, "part", b"part")
    yield Call("learn", "decided", limit_s=3 * LIMITS.write_s)
    told = yield from procedures.wait(keys.result, LIMITS.write_s)
    if told is None:
        raise OutcomeUnknownError(path, "silent", member.primary)
    if told != PUBLISHED:
        verdict = Verdict.decoded(told)
        if verdict.kind == "unknown":
            raise OutcomeUnknownError(path, verdict.text, verdict.process)
        raise verdict.error()

    return "saved"


def _flag(name: str) -> Call:
    return Call("learn", "flag", name)


def _check_all(member: Member, found: Mapping[int, bytes], limit_s: float) -> None:
    absent = [index for index in member.processes[1:] if index not in found]
    if absent:
        raise PeerSilentError(dict.fromkeys(absent), limit_s)


@cache
def _next_of(used: Used, process: int, save: tuple[str, int], ending: Any, answers: tuple[Any, ...]) -> Any:
    """Return what a process does next: a call, or what came of its procedure. A pure function."""
    path, n_save = save
    member = Process(process).member
    procedure: Procedure[Any]
    if ending == "give up":
        procedure = procedures.give_up(member, path)
    elif ending is not None:
        identity, failure, verdict, flags = ending
        procedure = used.end(
            member,
            path,
            OperationKeys(identity),
            None if failure is None else Verdict.decoded(failure),
            None if verdict is None else Verdict.decoded(verdict),
            is_local=False,
            has_begun="has_begun" in flags,
            is_closed="is_closed" in flags,
        )
    else:
        body = _primary if process == 0 else _other
        procedure = body(used, member, path, f"op{n_save}")

    call: Any = None
    try:
        for given in (None, *answers):
            answer = dict(given[1]) if isinstance(given, tuple) and given[:1] == ("map",) else given
            call = procedure.send(answer)
    except StopIteration as end:
        return ("returned", end.value)
    except PenstockError as error:
        return ("raised", error)

    return call


class Explorer:
    """Looks at all that may happen in a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rows: set[Row] = set()
        self.outcomes: set[tuple[tuple[str, ...], ...]] = set()
        self.n_states = 0

    def explore(self) -> None:
        """Go through all states.

        Raises:
            BrokenPromiseError: With the steps that lead there.
        """
        start = World(0.0, {}, tuple(map(Process, range(COUNT))), frozenset())
        for process in start.processes:
            start = self._goes_on(start, process)

        seen: set[Any] = set()
        stack: list[tuple[World, Any]] = [(start, None)]
        while stack:
            world, trace = stack.pop()
            key = _key(world)
            if key in seen:
                continue

            seen.add(key)
            self.n_states += 1
            try:
                found = list(self._steps(world))
                if not found:
                    self._check_end(world)
            except BrokenPromiseError as error:
                raise BrokenPromiseError(f"{error}\n{_told(trace)}\n{world}") from None

            stack += [(after, (trace, what)) for what, after in found]

    def _steps(self, world: World) -> Iterator[tuple[str, World]]:
        scenario, is_urgent = self.scenario, False
        for process in world.processes:
            if process.life == "awake":
                step = self._step(world, process)
                if step is not None:
                    is_urgent = True
                    yield step
                if self._may_watch(world, process):
                    is_urgent = True
                    yield self._watch(world, process)
                if process.phase != "done":
                    if scenario.crashes == process.rank:
                        yield f"{process.rank} crashes", _with(world, process._replace(life="crashed"))
                    if scenario.pauses == process.rank and process.paused_s < 0:
                        paused = process._replace(life="paused", paused_s=world.now)
                        yield f"{process.rank} pauses", _with(world, paused)
            elif process.life == "paused":
                is_urgent |= world.now - process.paused_s >= scenario.longest_s
                yield from self._wake(world, process)

        if world.late and world.processes[0].life == "awake":
            (key, value), *others = world.late
            after = world._replace(late=tuple(others))
            if key not in world.service:
                identity = key.split("/")[1]
                after = after._replace(service={**world.service, key: value})
                after = after._replace(facts=world.facts | {("verdict", identity, value.decode())})
            yield f"late put {key}", after

        lives = [each for each in world.processes if each.life == "awake" and each.phase != "done"]
        if not is_urgent and lives:
            yield "a beat", self._beat(world)

    def _is_served(self, world: World, process: Process) -> bool:
        host = world.processes[0]
        return not self.scenario.with_service or process is host or host.life == "awake"

    def _path(self, process: Process) -> str:
        path = self.scenario.paths.get(process.rank, PATH)
        return path if self.scenario.is_one_path else f"{path}_{process.n_save}"

    def _call(self, process: Process) -> Any:
        ending: Any = process.phase if process.phase == "give up" else None
        if process.phase == "end":
            failure = None if process.failure is None else process.failure[1]
            known = process.answers[0] if process.answers else process.verdict
            ending = (process.identity, failure, known, process.flags)
            return _next_of(
                self.scenario.used,
                process.rank,
                (self._path(process), process.n_save),
                ending,
                process.answers[1:],
            )

        return _next_of(
            self.scenario.used, process.rank, (self._path(process), process.n_save), ending, process.answers
        )

    def _step(self, world: World, process: Process) -> tuple[str, World] | None:
        """Make the next call of a process, if it is answered now."""
        if process.phase == "done":
            return None

        call, now = self._call(process), world.now
        if process.scope is not None and process.scope.left_s(now) == 0.0:
            return self._out_of_time(world, process)

        if call.kind == "learn":  # that the verdict is a commit
            if process.verdict is not None:
                return self._answered(world, process, call, None, {})
            if process.waits is not None and process.waits.left_s(now) == 0.0:
                return self._fails(world, process, PeerSilentError({0: "write"}, 1.0), "it decides nothing")
            return None
        if call.kind == "sleep":
            over = process.waits is not None and process.waits.left_s(now) == 0.0
            return self._answered(world, process, call, None, {}) if over else None
        if not self._is_served(world, process):
            return None

        key, service = call.key, world.service
        match call.kind:
            case "put":
                if key in service and not call.replace:
                    return self._answered(world, process, call, False, {})
                return self._answered(world, process, call, True, {key: call.value})
            case "wait":
                found = service.get(key)
                over = call.limit_s == 0 or (process.waits is not None and process.waits.left_s(now) == 0.0)
                return self._answered(world, process, call, found, {}) if over or found is not None else None
            case "count":
                n = int(service.get(key, b"0")) + 1
                return self._answered(world, process, call, n, {key: str(n).encode()})
            case "delete":
                gone: dict[str, bytes | None] = {
                    each: None
                    for each in service
                    if each == key or (key.endswith("/") and each.startswith(key))
                }
                return self._answered(world, process, call, None, gone)
            case "under":
                below = {each.removeprefix(key): service[each] for each in service if each.startswith(key)}
                return self._answered(world, process, call, ("map", tuple(sorted(below.items()))), {})
            case _:
                by_index = _by_process(service, key)
                if "/at/" in key:  # only who is there is asked for
                    by_index = dict.fromkeys(by_index, b"")

                return self._answered(world, process, call, ("map", tuple(sorted(by_index.items()))), {})

    def _answered(
        self,
        world: World,
        process: Process,
        call: Call,
        answer: Any,
        changes: Mapping[str, bytes | None],
    ) -> tuple[str, World]:
        """Give a process its answer, and go on to its next call of the service."""
        facts = world.facts
        service = world.service
        if changes:
            service = {**service, **{key: value for key, value in changes.items() if value is not None}}
            for key, value in changes.items():
                if value is None:
                    del service[key]
            if call.key.endswith("/verdict") and call.kind == "put":
                identity = call.key.split("/")[1]
                facts |= {("verdict", identity, call.value.decode())}
                self._check_verdict(world, identity, Verdict.decoded(call.value))

        world = world._replace(service=service, facts=facts)
        process = process._replace(answers=(*process.answers, answer), waits=None)
        what = f"{process.rank} {call.kind} {call.key}"
        world = self._goes_on(world, process, (call, answer))
        process = world.processes[process.rank]
        if process.phase == "body" and process.rank not in self.scenario.suspects:
            call = self._call(process)
            # Nothing that another one does meanwhile is changed by it, so it need not be tried later.
            if call.kind == "put" and _name(call.key) in ("plan/<i>", "part/<i>", "go", "result"):
                step = self._step(world, process)
                if step is not None:
                    return f"{what}, {step[0]}", step[1]

        return what, world

    def _goes_on(self, world: World, process: Process, last: tuple[Call, Any] | None = None) -> World:
        """Do what needs no service, up to the next call of it."""
        while True:
            if process.phase == "done":
                return _with(world, process)

            call = self._call(process)
            if isinstance(call, tuple):
                self._note(process, last, "it is over" if call[0] == "returned" else type(call[1]).__name__)
                if process.phase == "end":
                    process, world = self._left(world, process)
                elif process.phase == "give up":
                    process = self._failed(world, process, PeerSilentError({0: None}, 1.0))
                elif call[0] == "returned":
                    process = process._replace(phase="end", answers=(process.verdict,), scope=None)
                    process = process._replace(scope=self._limit(world, 3 * LIMITS.call_s))
                else:
                    process = self._failed(world, process, call[1])

                last = None
                continue

            if call.kind == "change":
                before = process.memory
                process = process._replace(memory=call.value(before), answers=(*process.answers, before))
                continue
            if call.kind == "enter":
                process = process._replace(identity=call.value.identity, answers=(*process.answers, None))
                continue
            if call.kind == "learn" and call.key != "decided":
                process, world = self._learned(world, process, call)
                continue

            if last is not None:
                self._note(process, last, f"{call.kind} {_name(call.key)}")
            if process.rank == 0 and process.phase == "body" and process.detector is None:
                process = process._replace(detector=self._detector(world, process))
            if process.scope is None and process.phase == "body" and "in" not in process.flags:
                limit_s = LIMITS.patience_s if process.rank else 1000.0
                process = process._replace(scope=self._limit(world, limit_s))
            if process.waits is None and call.limit_s:
                process = process._replace(waits=self._limit(world, call.limit_s))

            return _with(world, process)

    def _limit(self, world: World, limit_s: float) -> AwakeLimit:
        return AwakeLimit.begin(limit_s, LIMITS.beat_s, world.now)

    def _detector(self, world: World, process: Process) -> FailureDetector:
        later_s = LATER * LIMITS.silence_s
        if process.rank:
            return FailureDetector(later_s, LIMITS.beat_s, world.now)

        return FailureDetector(LIMITS.silence_s, LIMITS.beat_s, world.now, others_s=later_s)

    def _learned(self, world: World, process: Process, call: Call) -> tuple[Process, World]:
        process = process._replace(answers=(*process.answers, None))
        if call.key == "publish":
            fact = ("published", str(call.value), "")
            if fact in world.facts:
                raise BrokenPromiseError(f"{call.value} is published twice")
            verdicts = [each for kind, name, each in world.facts if (kind, name) == ("verdict", call.value)]
            if [Verdict.decoded(each.encode()).kind for each in verdicts] != ["commit"]:
                raise BrokenPromiseError(f"{call.value} is published after {verdicts}")
            return process, world._replace(facts=world.facts | {fact})
        if call.key == "flag":
            flags = process.flags | {str(call.value)}
            process = process._replace(flags=flags)
            if call.value == "in":
                now = world.now
                detector = process.detector or self._detector(world, process)
                detector = detector.hear({0: Heartbeat(-1, "join").encoded()}, now, now)
                process = process._replace(detector=detector, scope=None)
            fails = call.value == "works" and self.scenario.fails == process.rank and not process.n_save
            if fails:
                process = self._failed(world, process, StorageError("write", PATH, "no"))
            return process, world

        return process._replace(verdict=call.value.encoded()), world

    def _failed(self, world: World, process: Process, error: BaseException) -> Process:
        """Begin to leave, as `Membership.end` does."""
        detector = process.detector
        is_own = isinstance(error, PeerSilentError) and process.verdict is None
        if is_own and detector is not None and any(map(detector.gave_up, getattr(error, "seen", ()))):
            error = PeerSilentError({process.rank: "write"}, 1.0)

        if not process.identity:
            result = _result(error)
            return self._next_save(process, result)

        told = verdict_of(error, process.rank, "write").encoded()
        of_primary = isinstance(error, PeerSilentError) and 0 in error.seen and process.verdict is None
        is_unknown = isinstance(error, OutcomeUnknownError) and process.rank and error.processes == (0,)
        most_s = LIMITS.beat_s / 2 if (of_primary and process.rank) or is_unknown else 3 * LIMITS.call_s
        return process._replace(
            phase="end",
            answers=(process.verdict,),
            failure=(_result(error), told),
            waits=None,
            scope=self._limit(world, most_s),
            flags=process.flags | ({"of_primary"} if of_primary and process.rank else set()),
        )

    def _fails(self, world: World, process: Process, error: BaseException, why: str) -> tuple[str, World]:
        what = f"{process.rank} fails: {why}"
        return what, self._goes_on(world, self._failed(world, process, error))

    def _out_of_time(self, world: World, process: Process) -> tuple[str, World]:
        if process.phase == "end":
            call = self._call(process)
            is_claim = call.kind == "put" and call.key.endswith("/verdict")
            if is_claim and not self._is_served(world, process):
                world = world._replace(late=(*world.late, (call.key, call.value)))

            process, world = self._left(world, process)
            return f"{process.rank} gives up to leave", self._goes_on(world, process)

        if process.phase == "give up" or process.identity:
            return self._fails(world, process, PeerSilentError({0: None}, 1.0), "the primary never came")

        process = process._replace(
            phase="give up", answers=(), waits=None, scope=self._limit(world, LIMITS.call_s)
        )
        return f"{process.rank} gives up", self._goes_on(world, process)

    def _left(self, world: World, process: Process) -> tuple[Process, World]:
        """Note what the caller of a save is told."""
        result = "saved" if process.failure is None else process.failure[0]
        kind = None if process.verdict is None else Verdict.decoded(process.verdict).kind
        if result.startswith("PeerSilentError") and kind not in (None, "commit"):
            result = _result(Verdict.decoded(process.verdict or b"").error())
        elif "of_primary" in process.flags and "has_brought" in process.flags and kind in (None, "commit"):
            result = _result(OutcomeUnknownError(PATH, "silent", 0))

        identity = process.identity
        self._check_result(world, process, identity, result)
        return self._next_save(process, result), world

    def _next_save(self, process: Process, result: str) -> Process:
        n_save = process.n_save + 1
        is_over = n_save == self.scenario.n_saves
        return Process(
            process.rank,
            n_save,
            "done" if is_over else "body",
            process.life,
            paused_s=process.paused_s,
            memory=process.memory,
            results=(*process.results, result),
        )

    def _may_watch(self, world: World, process: Process) -> bool:
        if not self._takes_part(process) or process.verdict is not None:
            return False

        keys = OperationKeys(process.identity)
        return self._is_served(world, process) and keys.verdict in world.service

    def _watch(self, world: World, process: Process) -> tuple[str, World]:
        """Hear the verdict, beside what the body does."""
        said = world.service[OperationKeys(process.identity).verdict]
        verdict, what = Verdict.decoded(said), f"{process.rank} hears the verdict"
        process = process._replace(verdict=said)
        if verdict.kind == "commit":
            self._note_event(process, "the verdict is a commit", "go on")
            return what, _with(world, process)

        self._note_event(process, f"the verdict is {verdict.kind}", "end")
        return what, self._goes_on(world, self._failed(world, process, verdict.error()))

    def _wake(self, world: World, process: Process) -> Iterator[tuple[str, World]]:
        """Let a process go on: at once, with an old answer, or with a heartbeat before all else."""
        awake = process._replace(life="awake")
        if not self._takes_part(process):
            yield f"{process.rank} wakes", self._looks(_with(world, awake), process.rank)
            return

        assert process.detector is not None
        looked_s = process.detector.looked_s
        old = {index: beat for index, beat in process.detector.beats.items() if index != process.rank}
        stale = awake._replace(detector=process.detector.hear(old, looked_s, world.now))
        for name, each in (("", awake), (" with an old answer", stale)):
            after = _with(world, each)
            yield f"{process.rank} wakes{name}", self._looks(after, process.rank)
            if self._is_served(after, each):
                beating = self._beats(after, each)
                yield f"{process.rank} wakes{name} and beats", self._looks(beating, process.rank)

    def _beats(self, world: World, process: Process) -> World:
        beat = b"%d" % world.now
        key = OperationKeys(process.identity).each("at", process.rank)
        return world._replace(service={**world.service, key: beat})

    def _beat(self, world: World) -> World:
        """Let a beat pass: all that are awake send heartbeats, hear, and judge."""
        world = world._replace(now=world.now + LIMITS.beat_s)
        if world.now > LONGEST_S:
            raise BrokenPromiseError("somebody waits for ever")

        now = world.now
        for process in world.processes:
            if process.life == "awake":
                process = process._replace(
                    waits=None if process.waits is None else process.waits.look(now),
                    scope=None if process.scope is None else process.scope.look(now),
                )
                world = _with(world, process)
                if self._takes_part(process) and self._is_served(world, process):
                    world = self._beats(world, process)

        for process in world.processes:
            if process.life == "awake" and self._takes_part(process) and self._is_served(world, process):
                world = self._hears(world, process)
        for process in world.processes:
            if process.life == "awake":
                world = self._looks(world, process.rank)

        return world

    @staticmethod
    def _takes_part(process: Process) -> bool:
        return process.phase == "body" and "in" in process.flags

    def _needs_nobody(self, process: Process) -> bool:
        return process.rank == 0 and ("has_all" in process.flags or process.verdict is not None)

    def _hears(self, world: World, process: Process) -> World:
        assert process.detector is not None
        if self._needs_nobody(process):
            return world

        now, keys = world.now, OperationKeys(process.identity)
        if process.rank == 0:
            found = _by_process(world.service, keys.each("at"))
        else:
            value = world.service.get(keys.each("at", 0))
            if value is None:
                self._note_event(process, "all is forgotten", "end")
                return self._goes_on(world, self._forgotten(world, process))
            found = {0: value}

        detector = process.detector.hear(found, now, now)
        return _with(world, process._replace(detector=detector))

    def _forgotten(self, world: World, process: Process) -> Process:
        if "has_brought" in process.flags or process.verdict is not None:
            error: PenstockError = OutcomeUnknownError(PATH, "stood still", process.rank)
        else:
            error = PeerSilentError({process.rank: "write"}, 1.0)

        return self._failed(world, process, error)

    def _looks(self, world: World, index: int) -> World:
        """Look at the clock, and judge who is silent."""
        process, now = world.processes[index], world.now
        process = process._replace(
            waits=None if process.waits is None else process.waits.look(now),
            scope=None if process.scope is None else process.scope.look(now),
        )
        world = _with(world, process)
        if not self._takes_part(process) or self._needs_nobody(process):
            return world

        assert process.detector is not None
        detector = process.detector.look(now)
        process = process._replace(detector=detector)
        world = _with(world, process)
        silent = detector.silent(by_answers=index == 0)
        silent.pop(index, None)
        if silent and index == 0:
            keys = OperationKeys(process.identity)
            brought = _by_process(world.service, keys.each("part"))
            silent = {each: stage for each, stage in silent.items() if each not in brought}
            if len(brought) == COUNT - 1:
                world = world._replace(service={**world.service, keys.here("part"): b"1"})
        if not silent:
            return world

        self._note_event(process, "silence", "end")
        error: PenstockError = PeerSilentError(silent, 1.0)
        if process.verdict is not None and index:
            error = OutcomeUnknownError(PATH, "silent", 0)

        return self._goes_on(world, self._failed(world, process, error))

    def _check_verdict(self, world: World, identity: str, verdict: Verdict) -> None:
        before = [each for kind, name, each in world.facts if (kind, name) == ("verdict", identity)]
        is_gone = ("forgotten", identity, "") in world.facts
        if before and not is_gone and OperationKeys(identity).each("at", 0) in world.service:
            raise BrokenPromiseError(f"two verdicts of {identity}: {before} and {verdict}")

        named = set(verdict.seen) if verdict.kind == "silent" else set[int]()
        self._check_named(named, f"the verdict {verdict}")

    def _check_named(self, named: set[int], what: str) -> None:
        if named - self.scenario.suspects:
            raise BrokenPromiseError(f"{what} names {sorted(named)}, of whom not all were paused or crashed")

    def _check_result(self, world: World, process: Process, identity: str, result: str) -> None:
        """Compare what a caller is told with what is so."""
        is_published = ("published", identity, "") in world.facts
        name, _, named = result.partition(" of ")
        if name in ("PeerSilentError", "OutcomeUnknownError"):
            self._check_named(set(map(int, named.split())), f"process {process.rank}")
        if name == "saved" and not is_published:
            raise BrokenPromiseError(f"process {process.rank} was told that {identity} is saved")
        if name.startswith("Peer") and is_published:
            raise BrokenPromiseError(f"process {process.rank} was told that {identity} failed: {result}")

    def _check_end(self, world: World) -> None:
        """Nobody can do anything any more."""
        waiting = [each.rank for each in world.processes if each.life == "awake" and each.phase != "done"]
        if waiting:
            raise BrokenPromiseError(f"{waiting} wait for ever")

        self.outcomes.add(tuple(each.results for each in world.processes))
        if self.scenario.crashes is None:
            for identity, names in _identities(world.service).items():
                if OperationKeys(identity).each("at", 0) not in world.service:
                    raise BrokenPromiseError(f"keys of {identity} came back: {names}")

    def _note(self, process: Process, last: tuple[Call, Any] | None, then: str) -> None:
        if last is None:
            return

        call, answer = last
        role = "primary" if process.rank == 0 else "other"
        self.rows.add((role, f"{call.kind} {_name(call.key)}", _said(call, answer), then))

    def _note_event(self, process: Process, event: str, then: str) -> None:
        self.rows.add(("primary" if process.rank == 0 else "other", "takes part", event, then))


def _identities(service: Service) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in service:
        parts = key.split("/")
        if parts[1] not in ("join", "ended"):
            found.setdefault(parts[1], []).append("/".join(parts[2:]))

    return found


def _by_process(service: Service, prefix: str) -> dict[int, bytes]:
    return {int(key.removeprefix(prefix)): value for key, value in service.items() if key.startswith(prefix)}


def _result(error: BaseException) -> str:
    named = " ".join(map(str, getattr(error, "processes", ())))
    return f"{type(error).__name__} of {named}"


def _with(world: World, process: Process) -> World:
    at = process.rank
    return world._replace(processes=(*world.processes[:at], process, *world.processes[at + 1 :]))


def _name(key: str) -> str:
    """Return a key as the table calls it."""
    parts = key.split("/")
    if len(parts) < 2:
        return key
    if parts[1] in ("join", "ended"):
        return parts[1] if parts[1] == "join" or parts[-1] != "n" else "ended/n"
    if len(parts) > 3:
        return f"{parts[2]}/" + ("" if not parts[3] else "<i>")

    return parts[2] if len(parts) > 2 and parts[2] else "all"


def _said(call: Call, answer: Any) -> str:
    match call.kind:
        case "put":
            return "is set" if answer else "was set before"
        case "wait":
            return "is absent" if answer is None else "is there"
        case "count":
            return "all" if answer == COUNT else "all others" if answer == COUNT - 1 else "not all"
        case "by_process":
            return "all" if len(answer[1]) >= COUNT - 1 else "not all"
        case _:
            return ""


def _key(world: World) -> Any:
    """Return what tells a state from others: times count from now."""
    now = world.now
    return (
        frozenset(
            [(key, _age(value, now) if "/at/" in key else value) for key, value in world.service.items()]
        ),
        world.facts,
        world.late,
        tuple([_relative(each, now) for each in world.processes]),
    )


def _age(beat: bytes, now: float) -> object:
    return int(beat) - now if beat.isdigit() else beat


def _relative(process: Process, now: float) -> Any:
    detector = process.detector
    limits = [
        None if limit is None else (limit.looked_s - now, limit.over_s - now, limit.n_anew)
        for limit in (process.waits, process.scope)
    ]

    judged = None
    if detector is not None and process.phase == "body":
        since = tuple(sorted((index, at - now) for index, at in detector.since.items()))
        judged = (
            detector.looked_s - now,
            detector.asked_s - now,
            since,
            tuple(sorted((index, _age(beat, now)) for index, beat in detector.beats.items())),
            tuple(sorted(detector.n_anew.items())),
            detector.was_away and tuple(sorted(detector.n_news.items())),
        )

    paused_s = process.paused_s if process.life != "paused" else process.paused_s - now
    known = process._replace(waits=None, scope=None, detector=None, paused_s=min(paused_s, 0.0))
    return known, tuple(limits), judged


def _told(trace: Any) -> str:
    steps: list[str] = []
    while trace is not None:
        trace, what = cast("tuple[Any, str]", trace)
        steps.append(what)

    return "\n".join(reversed(steps))


def explored(scenario: Scenario) -> Explorer:
    """Return what was seen."""
    explorer = Explorer(scenario)
    explorer.explore()
    return explorer


PAGE = Path(__file__).parents[3] / "docs/reference/coordination.md"
HEAD = "| who | has called | and heard | then |\n| --- | --- | --- | --- |\n"

SHORT = {
    "nothing": Scenario(),
    "process 0 crashes": Scenario(crashes=0),
    "process 1 crashes": Scenario(crashes=1),
    "process 0 fails, and all save again": Scenario(fails=0, n_saves=2),
    "process 1 fails, and all save again": Scenario(fails=1, n_saves=2),
}
LONG = {
    "process 1 is paused": Scenario(pauses=1),
    "process 0 is paused": Scenario(pauses=0),
    "process 1 is paused and crashes": Scenario(pauses=1, crashes=1),
    "process 1 is paused, 2 crashes": Scenario(pauses=1, crashes=2),
    "process 1 is paused, 0 crashes": Scenario(pauses=1, crashes=0),
    "process 0 is paused, 1 crashes": Scenario(pauses=0, crashes=1),
    "process 0 is paused and crashes": Scenario(pauses=0, crashes=0),
    "process 0 is paused with the service": Scenario(pauses=0, with_service=True, longest_s=12.0),
    "process 1 is paused, 2 fails, and all save again": Scenario(pauses=1, fails=2, n_saves=2),
}


def table() -> list[str]:
    """Return the rows of the table in the documentation."""
    return PAGE.read_text().partition(HEAD)[2].splitlines()


def lines_of(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the line of the table for each row, in its order."""
    for who, call, heard, then in sorted(rows):
        yield f"| {who} | `{call}` | {heard} | `{then}` |"
