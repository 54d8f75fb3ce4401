"""Finds the limit of a save or a restore, and what makes it faster: a model is fitted to its figures.

The stages before the store make messages, one after another. The store's workers take them, several at a
time: as many as the budgets of memory let be under way (Little's law). A message costs a latency, and its
bytes at a bandwidth, of each stream or of all together. `report.explain()` says what the model finds after
one run; `penstock tune` fits it again after each of its runs, to choose what it tries next. Both change the
same options, which are the `Settings`.
"""

from __future__ import annotations

__all__ = (
    "GAIN",
    "Diagnosis",
    "FlowModel",
    "Limit",
    "Settings",
    "alternatives",
    "bottleneck_of",
    "diagnose",
    "fit",
    "wall_s",
)

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, product
from statistics import median
from typing import Final, Literal, TypeAlias, final

from penstock.kernel.memory.regulator import Flow
from penstock.kernel.pipeline.run_context import BUDGET_PIECES, RunLimits, piece_bytes_within
from penstock.kernel.pipeline.statistics import Advice, Span, StageStatistics
from penstock.kernel.words import counted

MIB: Final = 2**20

GAIN: Final = 0.92
"""A change that makes a run faster leaves at most this part of the time: less is noise."""


# What is changed.


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one flow that depend on each other, as one value. 0 bytes: unknown, and no limit."""

    concurrency: int  #: of the stage `write` or `read`
    piece_bytes: int  #: as chosen; a small budget makes pieces smaller
    limit_bytes: int = 0
    in_flight_bytes: int = 0

    def options(self, flow: Flow, before: Settings) -> dict[str, object]:
        """Return what differs from other settings, by the dotted keys of the configuration."""
        names = [each.name for each in fields(self) if getattr(self, each.name) != getattr(before, each.name)]
        return {_KEYS[flow][name]: getattr(self, name) for name in names}

    def with_options(self, flow: Flow, options: Mapping[str, object]) -> Settings:
        """Return these settings with those of the options that are among them."""
        known = {name: options[key] for name, key in _KEYS[flow].items() if key in options}
        return replace(self, **known) if known else self  # type: ignore[arg-type]

    @property
    def message_bytes(self) -> int:
        """The bytes of a piece under the budgets."""
        most = self.piece_bytes if not self.in_flight_bytes else min(self.piece_bytes, self.in_flight_bytes)
        return piece_bytes_within(most, self.limit_bytes) if self.limit_bytes else most

    def distance(self, other: Settings) -> float:
        """Return how far apart two settings are: one for each option that differs, and how often doubled."""
        pairs = [(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]
        return sum([1 + abs(math.log2(one / two)) for one, two in pairs if one != two and one and two])


_KEYS: Final[Mapping[Flow, Mapping[str, str]]] = {
    "save": {
        "concurrency": "save.write.concurrency",
        "piece_bytes": "save.piece_bytes",
        "limit_bytes": "memory.limit_bytes",
        "in_flight_bytes": "memory.save_concurrent_bytes",
    },
    "restore": {
        "concurrency": "restore.read.concurrency",
        "piece_bytes": "restore.piece_bytes",
        "limit_bytes": "memory.limit_bytes",
        "in_flight_bytes": "memory.restore_concurrent_bytes",
    },
}
_WORKERS: Final = (1, 2, 4, 8, 16, 32, 64)
_PIECES: Final = tuple([MIB << power for power in range(8)])
_TIMES_MEMORY: Final = (1, 4, 16, 64)
_TIMES_IN_FLIGHT: Final = 4


def alternatives(
    now: Settings, *, most_workers: int = _WORKERS[-1], most_memory: float = math.inf
) -> Iterator[Settings]:
    """Yield every combination of values that is worth a thought, the present ones among them, each once.

    Args:
        now: The present settings.
        most_workers: No combination has more.
        most_memory: Nor a larger budget, in bytes, unless the present one is.
    """
    workers = sorted({now.concurrency, *[each for each in _WORKERS if each <= most_workers]})
    pieces = sorted({now.piece_bytes, *_PIECES})
    limits = [now.limit_bytes * times for times in _TIMES_MEMORY[1:]]
    limits = [limit for limit in limits if limit <= most_memory]
    for n, nbytes in product(workers, pieces):
        settings = Settings(n, nbytes, now.limit_bytes, now.in_flight_bytes)
        yield settings
        # A larger budget is of use where this one makes pieces smaller, or has no room for the workers.
        rooms = [settings]
        if now.in_flight_bytes and n * nbytes > now.in_flight_bytes:
            rooms.append(replace(settings, in_flight_bytes=_TIMES_IN_FLIGHT * now.in_flight_bytes))
        if now.limit_bytes and max(n, BUDGET_PIECES) * nbytes > now.limit_bytes:
            yield from [replace(room, limit_bytes=limit) for room in rooms for limit in limits]

        yield from rooms[1:]


# The model.

Sharing: TypeAlias = Literal["each", "all", "unknown"]
"""Of a bandwidth: each stream has it, all streams share it, or the figures do not say."""


@final
@dataclass(frozen=True, slots=True)
class FlowModel:
    """The seconds of a save or a restore, as a function of its settings."""

    large_bytes: float  #: that are cut into pieces
    n_small: int  #: messages that are smaller by far, whatever a piece is
    latency_s: float  #: of a message in the store
    stream_rate: float  #: bytes per second of one stream
    total_rate: float  #: and of all together
    feed_s: float  #: of a message before the store, whatever its size
    feed_s_per_byte: float  #: before the store, of a restore after it
    rest_s: float = 0.0  #: what no setting changes
    is_leased: bool = True  #: whether what is under way counts to the budget of memory
    is_apart: bool = False  #: whether another stage, at the same time, takes the time of the bytes

    def n_messages(self, settings: Settings) -> int:
        """Return the number of messages for the store's workers."""
        return math.ceil(self.large_bytes / settings.message_bytes) + self.n_small

    def room(self, settings: Settings) -> float:
        """Return the number of them that the budgets let be under way."""
        limits = [settings.in_flight_bytes, settings.limit_bytes if self.is_leased else 0]
        return min([max(1, limit // settings.message_bytes) for limit in limits if limit], default=math.inf)

    def seconds(self, settings: Settings) -> float:
        """Predict a run."""
        n = max(1, math.ceil(self.large_bytes / settings.message_bytes))
        nbytes, room = self.large_bytes / n, self.room(settings)
        at_once = min(settings.concurrency, n, room)
        feed_s = self.fed_s(nbytes)
        rounds, left = divmod(n, at_once)
        store_s = rounds * self.each_s(nbytes, at_once) + (self.each_s(nbytes, left) if left else 0.0)
        store_s += self.n_small * self.latency_s / min(settings.concurrency, n + self.n_small)
        # What the budget lets be under way is on its way to the store, or in it.
        held_s = n * (feed_s + self.each_s(nbytes, at_once)) / room
        # The last message is written when all are made, and the first is made before any is written.
        return self.rest_s + max(n * feed_s + self.each_s(nbytes, 1), feed_s + store_s, feed_s + held_s)

    def fed_s(self, nbytes: float) -> float:
        """Predict the seconds of one message before the store, or of a restore before and after it."""
        of_bytes_s = nbytes * self.feed_s_per_byte
        return max(self.feed_s, of_bytes_s) if self.is_apart else self.feed_s + of_bytes_s

    def each_s(self, nbytes: float, at_once: float) -> float:
        """Predict the seconds of one message in the store, with so many under way."""
        return self.latency_s + nbytes / min(self.stream_rate, self.total_rate / at_once)


@final
@dataclass(frozen=True, slots=True)
class Fitted:
    """A model under each of the two assumptions about the store, and which of them the figures bear out."""

    flow: Flow
    settings: Settings  #: of the run
    each: FlowModel  #: if every stream has a bandwidth for itself
    shared: FlowModel  #: if all share one
    sharing: Sharing
    busy_s: float  #: of the store's busiest worker
    processors: int = 0  #: if all of them were busy

    @property
    def n_now(self) -> int:
        """The number of messages there were."""
        return self.each.n_messages(self.settings)

    @property
    def n_enough(self) -> int:
        """Their number if the budgets were large."""
        return self.each.n_messages(replace(self.settings, limit_bytes=0, in_flight_bytes=0))

    @property
    def is_cut(self) -> bool:
        """True if a small budget made many messages of few."""
        return self.n_enough * _CUT <= self.n_now

    @property
    def is_late(self) -> bool:
        """True if a message waits for the store's latency more than for its bandwidth."""
        model, now = self.cautious, self.settings
        at_once = min(now.concurrency, model.n_messages(now), model.room(now))
        return model.latency_s > _BUSY * model.each_s(min(now.message_bytes, model.large_bytes), at_once)

    @property
    def cautious(self) -> FlowModel:
        """The model that promises less."""
        return self.each if self.sharing == "each" else self.shared

    @property
    def hopeful(self) -> FlowModel:
        """The model that promises more."""
        return self.shared if self.sharing == "all" else self.each


_STORE: Final[Mapping[Flow, str]] = {"save": "write", "restore": "read"}
_FEEDS: Final[Mapping[Flow, Sequence[str]]] = {
    "save": ("device_to_host", "encode"),
    "restore": ("host_to_device",),
}
_MESSAGE_STAGES: Final = ("limit_bytes", "commit")
"""Their time for a message hardly depends on its bytes: it is what a message costs the event loop."""

_DOCUMENTS: Final[Mapping[Flow, tuple[str, int]]] = {"save": ("commit", 4), "restore": ("locate", 6)}
"""A stage that waits for the store alone, with small files, at least so often."""

_SMALL: Final = 1 / 8  #: of the largest message: one that is no larger is about latency
_CLEAR: Final = 0.05  #: by so much of the bytes must one assumption fit better than the other
_MOST_SPANS: Final = 256  #: are looked at: they tell enough, and a report is made in the event loop


def fit(
    flow: Flow, stages: Sequence[StageStatistics], limits: RunLimits, processor_s: float = 0.0
) -> Fitted | None:
    """Fit the model to the figures of a run; None if no array bytes went to or from the store.

    Args:
        flow: What it was.
        stages: What was measured.
        limits: Its sizes and budgets.
        processor_s: Of the process in that time. If all processors were busy, the workers share these.
    """
    by_name = {stage.name: stage for stage in stages}
    store = by_name.get(_STORE[flow])
    spans = [span for span in store.spans if span.nbytes][:_MOST_SPANS] if store is not None else []
    if store is None or not spans or not limits.piece_bytes:
        return None

    settings = Settings(
        store.workers,
        limits.chosen_piece_bytes or limits.piece_bytes,
        limits.budget_bytes,
        limits.in_flight_bytes,
    )
    largest = max([span.nbytes for span in spans])
    large = [span for span in spans if span.nbytes > largest * _SMALL]
    small = [span for span in spans if span.nbytes <= largest * _SMALL]
    latency_s = _latency_s(flow, by_name, large, small)
    sharing, stream_rate, total_rate = _bandwidths(large, latency_s)
    # A stage takes few of its messages to the record if there are very many: the bytes are those of all.
    share = store.nbytes / sum([span.nbytes for span in spans])
    feeds = [by_name[name] for name in _FEEDS[flow] if name in by_name]
    small_steps = [
        median(map(_busy_s, by_name[name].spans))
        for name in _MESSAGE_STAGES
        if name in by_name and len(by_name[name].spans) >= _MANY
    ]
    message_s = sum(small_steps)
    is_apart = flow == "restore"
    n = len(spans) * share
    model = FlowModel(
        large_bytes=share * sum([span.nbytes for span in large]),
        n_small=round(share * len(small)),
        latency_s=latency_s,
        stream_rate=stream_rate,
        total_rate=math.inf,
        feed_s=message_s,
        feed_s_per_byte=max(
            [
                max(stage.busiest_s - n * (_fixed_s(stage) if is_apart else message_s), 0.0) / store.nbytes
                for stage in feeds
            ],
            default=0.0,
        ),
        # More at once than the budget has room for: the bytes were in the caller's memory already.
        is_leased=_most_bytes(spans) <= max(settings.limit_bytes, largest),
        is_apart=is_apart,
    )
    took = wall_s(stages)
    is_computing = 0 < _SATURATED * limits.processors * took <= processor_s
    shared = replace(model, stream_rate=math.inf, total_rate=total_rate)
    return Fitted(
        flow,
        settings,
        _scaled(model, settings, took),
        _scaled(shared, settings, took),
        "all" if is_computing else sharing,
        store.busiest_s,
        limits.processors if is_computing else 0,
    )


_MANY: Final = 4
_SATURATED: Final = 0.85  #: processors that are busy for this part of the time have no room for more workers


def _scaled(model: FlowModel, settings: Settings, took_s: float) -> FlowModel:
    """Let a model say of the run that it was fitted to what it took."""
    predicted_s = model.seconds(settings)
    if predicted_s <= took_s:
        return replace(model, rest_s=took_s - predicted_s)

    # More overlapped than the model thinks.
    factor = took_s / predicted_s
    return replace(
        model,
        latency_s=model.latency_s * factor,
        stream_rate=model.stream_rate / factor,
        total_rate=model.total_rate / factor,
        feed_s=model.feed_s * factor,
        feed_s_per_byte=model.feed_s_per_byte * factor,
    )


def _latency_s(
    flow: Flow, by_name: Mapping[str, StageStatistics], large: Sequence[Span], small: Sequence[Span]
) -> float:
    """Return what a message costs in the store whatever its bytes, as far as the figures say.

    Small messages say it. Where there are none, a stage does that makes or reads small documents.
    """
    most_s = min(map(_busy_s, large))
    if small:
        return min(most_s, *map(_busy_s, small))

    name, n_files = _DOCUMENTS[flow]
    documents = by_name.get(name)
    return min(most_s, documents.busy_s / n_files) if documents is not None else 0.0


def _fixed_s(stage: StageStatistics) -> float:
    """Return what a message costs in a stage whatever its bytes, as small ones say it; 0 without those."""
    largest = max([span.nbytes for span in stage.spans], default=0)
    return min([_busy_s(span) for span in stage.spans if span.nbytes <= largest * _SMALL], default=0.0)


def _busy_s(span: Span) -> float:
    return max(span.end - span.start - span.memory_wait_s, 0.0)


def _bandwidths(spans: Sequence[Span], latency_s: float) -> tuple[Sharing, float, float]:
    """Return whether streams share a bandwidth, the one of each if they do not, and that of all if they do.

    If they do not, the bytes of a message go with its seconds. If they do, they go with its share of them: of
    each moment its part among those under way, or, where the store takes one after another, its turn.
    """
    intervals = [(span.start + min(latency_s, _busy_s(span)), span.end) for span in spans]
    nbytes = [float(span.nbytes) for span in spans]
    alone = [max(end - start, 1e-9) for start, end in intervals]
    stream_rate = sum(nbytes) / sum(alone)
    parts, turns = _parts(intervals), _turns(intervals)
    off_each = _misfit(nbytes, alone)
    off_shared, by = min([(_misfit(nbytes, parts), 0), (_misfit(nbytes, turns), 1)])
    total_rate = sum(nbytes) / max(sum((parts, turns)[by]), 1e-9)
    if abs(off_each - off_shared) < _CLEAR:
        return "unknown", stream_rate, total_rate

    return ("each" if off_each < off_shared else "all"), stream_rate, total_rate


def _parts(intervals: Sequence[tuple[float, float]]) -> list[float]:
    """Return, for each interval, its part of the time, where those that overlap have equal parts."""
    moments = sorted({moment for interval in intervals for moment in interval})
    # Sums up to each moment: so the part of an interval is a difference.
    starts = sorted([start for start, _ in intervals])
    ends = sorted([end for _, end in intervals])
    until: dict[float, float] = {}
    total, before, opened, closed = 0.0, moments[0], 0, 0
    for moment in moments:
        under_way = opened - closed
        total += (moment - before) / under_way if under_way else 0.0
        until[moment] = total
        while opened < len(starts) and starts[opened] <= moment:
            opened += 1
        while closed < len(ends) and ends[closed] <= moment:
            closed += 1

        before = moment

    return [max(until[end] - until[start], 1e-9) for start, end in intervals]


def _turns(intervals: Sequence[tuple[float, float]]) -> list[float]:
    """Return, for each interval, its time since the one that ended before it."""
    found = [0.0] * len(intervals)
    before = -math.inf
    for at in sorted(range(len(intervals)), key=lambda at: intervals[at][1]):
        start, end = intervals[at]
        found[at] = max(end - max(start, before), 1e-9)
        before = end

    return found


def _most_bytes(spans: Sequence[Span]) -> int:
    """Return how many bytes were under way at once."""
    ends = [(span.end, -span.nbytes) for span in spans]
    moments = sorted([*ends, *[(span.start, span.nbytes) for span in spans]])
    return max(accumulate([change for _, change in moments]))


def _misfit(nbytes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return by how much of the bytes one rate for all seconds is wrong: the root of the mean square."""
    rate = sum([n * s for n, s in zip(nbytes, seconds, strict=True)]) / sum([s * s for s in seconds])
    wrong = sum([(n - rate * s) ** 2 for n, s in zip(nbytes, seconds, strict=True)])
    return math.sqrt(wrong / sum([n * n for n in nbytes]))


# What is said.

Limit: TypeAlias = Literal[
    "nothing", "memory", "messages", "parallelism", "processors", "latency", "stream", "bandwidth", "stage"
]
"""The limit: too little memory, too many messages, too few under way, the processors, the store's
latency, its bandwidth of each stream or in all, or something else in a stage; nothing, if nothing ran."""


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The limit of a run, and the change that helps."""

    limit: Limit
    text: str  #: one to three sentences
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """That make it faster, by dotted keys; none if no option that the model knows does."""
    took_s: float = 0.0
    expected_s: float = 0.0  #: with these options
    is_sure: bool = True  #: False: they help only if the store gives each stream a bandwidth of its own
    stage: str = ""


_BUSY: Final = 0.5
"""A stage that is busy for this part of the time is the bottleneck, even if others wait for memory."""

_CUT: Final = 4  #: a budget that makes so many messages of one is small

_SHORT: Final = 0.25
"""If no stage is that busy, one that waits for memory for this part of the time says what is."""

_TINY_S: Final = 0.005
_FEW_LEAVES: Final = 1000
_FEW_BYTES: Final = MIB
_TIMES_WORKERS: Final = 4  #: more workers than so many times the present ones are a guess
_ENOUGH: Final = 1.1  #: the cheapest change is chosen of those that are within this of the best


@final
@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The bottleneck of a run: the stage, why, and for how many of how many seconds."""

    stage: StageStatistics
    why: Literal["busy", "memory_wait"]
    seconds: float
    of_s: float


def wall_s(stages: Sequence[StageStatistics]) -> float:
    """Seconds from the first to the last work of any stage."""
    spans = [span for stage in stages for span in stage.spans]
    if not spans:
        return max([stage.busiest_s for stage in stages], default=0.0)

    return max(span.end for span in spans) - min(span.start for span in spans)


def bottleneck_of(stages: Sequence[StageStatistics]) -> Bottleneck | None:
    """Return the stage that held the run up; None if no stage ran.

    A stage all of whose workers are busy most of the time is it, and then it is also why others wait for
    memory: it gives back too slowly. If none is that busy, and one waits for memory, the budget is it.
    """
    ran = [stage for stage in stages if stage.n_in]
    if not ran:
        return None

    whole = max(wall_s(stages), 1e-9)
    busiest = max(ran, key=lambda stage: stage.busiest_s)
    waiting = max(ran, key=_waited_s)
    if busiest.busiest_s < _BUSY * whole and _waited_s(waiting) >= _SHORT * whole:
        return Bottleneck(waiting, "memory_wait", _waited_s(waiting), whole)

    return Bottleneck(busiest, "busy", busiest.busiest_s, whole)


def _waited_s(stage: StageStatistics) -> float:
    return stage.memory_wait_s / stage.workers


def diagnose(
    stages: Sequence[StageStatistics],
    flow: Flow,
    n_leaves: int,
    nbytes: int,
    limits: RunLimits | None = None,
    processor_s: float = 0.0,
) -> Diagnosis:
    """Say what held a save or a restore up, and which options to change. Pure.

    Args:
        stages: What was measured.
        flow: What it was.
        n_leaves: All leaves: what a stage advises where there are many is wrong for four.
        nbytes: Array bytes.
        limits: The sizes and budgets of the run. Without them no gain can be foretold.
        processor_s: Of the process in that time.
    """
    found = bottleneck_of(stages)
    if found is None:
        return Diagnosis("nothing", f"No stage of this {flow} had anything to do.")

    few = nbytes < _FEW_BYTES or found.of_s < _TINY_S
    fitted = None if limits is None or few else fit(flow, stages, limits, processor_s)
    if fitted is None:
        return _by_stage(found, n_leaves, nbytes)

    better = _better(fitted, found.of_s)
    if better is not None:
        return _improved(fitted, found, better)
    if found.stage.name == _STORE[flow] and found.why == "busy":
        return _by_store(fitted, found, nbytes)
    if found.stage.name in _FEEDS[flow] and found.why == "busy" and fitted.is_cut:
        return _by_pieces(fitted, found)

    return _by_stage(found, n_leaves, nbytes)


@final
@dataclass(frozen=True, slots=True)
class _Better:
    settings: Settings
    expected_s: float
    if_shared_s: float  #: if all streams share the store's bandwidth


def _better(fitted: Fitted, took_s: float) -> _Better | None:
    """Return the least change that makes the run about as fast as any does; None if none does."""
    now = fitted.settings
    # Workers that have nothing to do come first. And each run shows no more than what the next step is.
    is_idle = fitted.each.n_messages(now) <= now.concurrency
    most = now.concurrency if is_idle else max(_TIMES_WORKERS * now.concurrency, 4)
    choices = [each for each in alternatives(now, most_workers=most) if each.concurrency >= now.concurrency]
    predicted = [(fitted.hopeful.seconds(settings), settings) for settings in choices]
    fastest_s = min([seconds for seconds, _ in predicted])
    enough = [each for each in predicted if each[0] <= _ENOUGH * fastest_s]
    if fitted.is_cut:  # then it is the budget that should be larger, if that alone suffices
        larger = [each for each in enough if replace(each[1], limit_bytes=now.limit_bytes) == now]
        enough = larger or enough

    expected_s, settings = min(enough, key=lambda each: (each[1].distance(now), each[0]))
    if expected_s > GAIN * took_s:
        return None

    return _Better(settings, expected_s, fitted.cautious.seconds(settings))


def _improved(fitted: Fitted, found: Bottleneck, better: _Better) -> Diagnosis:
    flow, took_s = fitted.flow, found.of_s
    options = better.settings.options(flow, fitted.settings)
    is_sure = better.if_shared_s <= better.expected_s / GAIN
    limit, cause = _cause(fitted, found, better, is_sure=is_sure)
    change = f"{_options_text(options)}: about {_short(better.expected_s)} s instead of {_short(took_s)}"
    if not is_sure:
        fewer = f"only fewer bytes help: {_FEWER[flow]}"
        if better.if_shared_s <= GAIN * took_s:
            fewer = f"about {_short(better.if_shared_s)} s"

        change += (
            ", if the store gives more streams as much each, which this run does not show. If all share one "
            f"bandwidth ({_rate(fitted.shared.total_rate)}), {fewer}"
        )

    return Diagnosis(
        limit, f"{cause} {change}.", options, took_s, better.expected_s, is_sure, found.stage.name
    )


_FEWER: Final[Mapping[Flow, str]] = {
    "save": '`[format] codec = "auto"`, or `base=` for what did not change',
    "restore": "`only=`, or `mmap=True`",
}


_UNREAD: Final[Mapping[Flow, str]] = {
    "save": "`base=` for what did not change",
    "restore": "`only=`, or `mmap=True`",
}
"""By which bytes are not even looked at."""


def _cause(fitted: Fitted, found: Bottleneck, better: _Better, *, is_sure: bool) -> tuple[Limit, str]:
    """Return what the change is for, and a sentence that says it: of its parts the one that gains most."""
    now, new, model = fitted.settings, better.settings, fitted.hopeful
    stage, n = _STORE[fitted.flow], model.n_messages(now)
    parts = {
        "memory": replace(now, limit_bytes=new.limit_bytes, in_flight_bytes=new.in_flight_bytes),
        "larger": replace(now, piece_bytes=max(now.piece_bytes, new.piece_bytes)),
        "more": replace(now, concurrency=new.concurrency, piece_bytes=min(now.piece_bytes, new.piece_bytes)),
    }
    part = min([name for name in parts if parts[name] != now], key=lambda name: model.seconds(parts[name]))
    if part == "memory":
        return "memory", _memory_text(fitted, found, better)
    if fitted.is_late:
        return "latency", _latency_text(fitted)
    if part == "larger":
        cost = f"{1000 * model.feed_s:.2g} ms of the event loop for each of {counted(n, 'message')}"
        return "messages", f"Small messages are the bottleneck: {cost}."
    if new.piece_bytes < now.piece_bytes:
        messages = f"{counted(n, 'message')} for {counted(now.concurrency, 'worker')}"
        return "parallelism", f"Parallelism is the bottleneck: {messages} of {stage!r}."

    took, rate = _took(fitted.busy_s, found.of_s), _rate(fitted.each.stream_rate)
    busy = f"{stage!r} was busy {took}, with {rate} for each of {counted(now.concurrency, 'worker')}"
    if not is_sure:
        return "bandwidth", f"The store's bandwidth is the bottleneck: {busy}."

    return "stream", f"The store's bandwidth of each stream is the bottleneck: {busy}."


def _memory_text(fitted: Fitted, found: Bottleneck, better: _Better) -> str:
    now, new, model = fitted.settings, better.settings, fitted.hopeful
    n, enough = fitted.n_now, fitted.n_enough
    why: list[str] = []
    if n > enough:
        why.append(f"makes {counted(n, 'message')} of what could travel in {enough}")
    if model.room(now) < min(now.concurrency, n):
        few = f"{model.room(now):.0f} of {counted(now.concurrency, 'worker')}"
        why.append(f"lets {few} of {_STORE[fitted.flow]!r} work at a time")
    if found.why == "memory_wait" or not why:
        waited = _took(_waited_s(found.stage), found.of_s)
        why.append(f"made {found.stage.name!r} wait {waited}")

    name, budget = "the budget of", now.limit_bytes
    if new.limit_bytes == now.limit_bytes:
        name, budget = "the room in flight of", now.in_flight_bytes

    return f"Memory is the bottleneck: {name} {budget / MIB:.4g} MiB {' and '.join(why)}."


def _latency_text(fitted: Fitted) -> str:
    model = fitted.cautious
    messages = counted(model.n_messages(fitted.settings), "message")
    each = f"each of {messages} of {_STORE[fitted.flow]!r} waits {1000 * model.latency_s:.3g} ms"
    return f"The store's latency is the bottleneck: {each}, whatever its size."


def _by_store(fitted: Fitted, found: Bottleneck, nbytes: int) -> Diagnosis:
    """Say that the store is as fast as it gets."""
    flow, took = fitted.flow, _took(found.seconds, found.of_s)
    if fitted.processors:
        words = (
            f"The processors are the bottleneck: {_all_of(fitted.processors)} busy, as with copies and "
            f"checksums in {found.stage.name!r}, so that more workers have no room; {_STORE[flow]} less: "
            f"{_UNREAD[flow]}."
        )
        return Diagnosis("processors", words, {}, found.of_s, found.of_s, stage=found.stage.name)
    if fitted.is_late:
        nothing = f"Neither more workers nor larger pieces nor more memory make it faster: {flow} less often."
        words = f"{_latency_text(fitted)} {nothing}"
        return Diagnosis("latency", words, {}, found.of_s, found.of_s, stage=found.stage.name)

    rate = _rate(nbytes / found.seconds)
    words = (
        f"The store's bandwidth is the bottleneck: {found.stage.name!r} was busy {took}, with {rate} in all. "
        f"Neither more workers nor other pieces nor more memory make it faster; {_STORE[flow]} less: "
        f"{_FEWER[flow]}."
    )
    return Diagnosis("bandwidth", words, {}, found.of_s, found.of_s, stage=found.stage.name)


def _all_of(processors: int) -> str:
    return "the only one was" if processors == 1 else f"all {processors} were"


def _by_pieces(fitted: Fitted, found: Bottleneck) -> Diagnosis:
    """Say that a small budget makes many messages of few for a stage that copies their bytes.

    Of its time, messages of one size do not tell what is for each of them, and what for their bytes.
    """
    options = replace(fitted.settings, limit_bytes=BUDGET_PIECES * fitted.settings.piece_bytes).options(
        fitted.flow, fitted.settings
    )
    words = (
        f"Memory is the bottleneck: the budget of {fitted.settings.limit_bytes / MIB:.4g} MiB makes "
        f"{counted(fitted.n_now, 'message')} of what could travel in {fitted.n_enough}, and "
        f"{found.stage.name!r} was busy {_took(found.seconds, found.of_s)} with them. "
        f"{_options_text(options)}; how much that gains, this run does not show."
    )
    return Diagnosis("memory", words, options, found.of_s, found.of_s, False, found.stage.name)


def _by_stage(found: Bottleneck, n_leaves: int, nbytes: int) -> Diagnosis:
    stage, took = found.stage, _took(found.seconds, found.of_s)
    if found.why == "memory_wait":
        words = f"Memory is the bottleneck: the stage {stage.name!r} waited {took} for it."
        return Diagnosis("memory", f"{words} {stage.advice.memory_wait}", stage=stage.name)

    workers = f", with {stage.workers} workers" if stage.workers > 1 else ""
    advice = _advised(stage.advice, n_leaves, nbytes)
    words = f"The stage {stage.name!r} is the bottleneck: it was busy {took}{workers}. {advice}"
    return Diagnosis("stage", words, stage=stage.name)


def _advised(advice: Advice, n_leaves: int, nbytes: int) -> str:
    if advice.few_leaves and n_leaves < _FEW_LEAVES:
        return advice.few_leaves
    if advice.few_bytes and nbytes < _FEW_BYTES:
        return advice.few_bytes

    return advice.busy


def _options_text(options: Mapping[str, object]) -> str:
    """Return options as one writes them, with their tables."""
    from penstock.config.option_reference import as_toml  # heavy, and most reports are only kept

    written: list[str] = []
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        written.append(f"`[{section}] {name} = {as_toml(value, 'bytes' if name.endswith('bytes') else '')}`")

    return ", ".join(written)


def _took(seconds: float, of_s: float) -> str:
    if of_s < _TINY_S:
        return f"{1000 * seconds:.1f} of {1000 * of_s:.1f} ms"

    return f"{seconds:.2f} of {of_s:.2f} s"


def _short(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 99.5 else f"{seconds:.0f}"


def _rate(rate: float) -> str:
    return f"{rate / MIB:.3g} MiB/s"
