"""The bars of penstock's speed, as ratios of medians within one run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.bench.loops import LOOPS
from tests.bench.measures import (
    OURS,
    Measure,
    beside_its_own,
    beside_jax,
    cpu_share,
    longest_stall_ms,
    memory_per_leaf,
    memory_share,
    microseconds_per_leaf,
    noise_floor_ms,
    pairs_as_fast,
    per_leaf_growth,
    slow_down_percent,
    slowest_to_median,
    speed_of_raw,
    staged_ms,
    staged_share,
    stored_share,
    time_of,
    times_as_fast,
    times_its_time,
    written_share,
)
from tests.bench.results import Operation, Results
from tests.bench.units import figure


@dataclass(frozen=True)
class Bar:
    """Something that must hold."""

    text: str
    side: Literal["at least", "at most"]
    limit: float
    measure: Measure
    workload: str
    operation: str  #: whose profile explains a figure that falls short
    noise: Measure | None = (
        None  #: what of it is the machine's; where that is more than the limit, it is the limit
    )


@dataclass(frozen=True)
class Verdict:
    """A bar and what was measured."""

    text: str
    wanted: str
    measured: float | None
    verdict: Literal["pass", "short", "not measured"]
    workload: str
    operation: str
    note: str = ""


def judge(results: Results) -> list[Verdict]:
    """Hold the run against every bar."""
    return [_judged(bar, bar.measure(results), bar.noise(results) if bar.noise else None) for bar in BARS]


def _judged(bar: Bar, measured: float | None, noise: float | None) -> Verdict:
    verdict: Literal["pass", "short", "not measured"] = "not measured"
    limit = bar.limit if noise is None else max(bar.limit, noise)
    if measured is not None:
        good = measured >= limit if bar.side == "at least" else measured <= limit
        verdict = "pass" if good else "short"

    wanted = f"{bar.side} {bar.limit:g}"
    note = "" if noise is None else f"noise floor {figure(noise)}"
    return Verdict(bar.text, wanted, measured, verdict, bar.workload, bar.operation, note)


SAVE, INTO_JAX, INTO_NUMPY = Operation.SAVE, Operation.RESTORE_JAX, Operation.RESTORE_NUMPY
COLD, METADATA, SECOND = Operation.COLD_NUMPY, Operation.METADATA, Operation.SECOND_SAVE
OPEN, BEST = Operation.OPEN, Operation.BEST
BESIDE_1, BESIDE_10 = Operation.BESIDE_1, Operation.BESIDE_10
RAW = ("raw buffered", "raw O_DIRECT")
FIRST = "penstock, first save"
ONE_SHOT = "penstock, one-shot"
PLAIN = "Orbax uncompressed"
BOTH = ("Orbax", "Orbax async")
FACE, FACE_ASYNC, FACE_MANAGER = "penstock.orbax", "penstock.orbax async", "penstock.orbax manager"


def _fast(text: str, limit: float, workload: str, operation: str, *others: str, ours: str = OURS) -> Bar:
    measure = times_as_fast(workload, operation, *others, ours=ours)
    return Bar(text, "at least", limit, measure, workload, operation)


def _most(text: str, limit: float, measure: Measure, workload: str, operation: str) -> Bar:
    return Bar(text, "at most", limit, measure, workload, operation)


def _least(text: str, limit: float, measure: Measure, workload: str = "large") -> Bar:
    return Bar(text, "at least", limit, measure, workload, INTO_JAX)


def _near(text: str, limit: float, workload: str, operation: str) -> Bar:
    measure = times_its_time(workload, operation, "safetensors")
    return _most(text, limit, measure, workload, operation)


def _growth(text: str, operation: str, many: str = "many", few: str = "small") -> Bar:
    return _most(text, 1.3, per_leaf_growth(many, few, operation), many, operation)


def _staged(text: str, most_ms: float, ours: str = OURS) -> Bar:
    return _most(f"512 MiB staged{text}, ms", most_ms, staged_ms("half", ours), "half", SAVE)


def _stall(text: str, workload: str, loop: str) -> Bar:
    measure, noise = longest_stall_ms(workload, loop), noise_floor_ms(workload, loop)
    return Bar(f"{text}: longest stall of {loop}, ms", "at most", 10, measure, workload, SAVE, noise)


BARS = (
    _fast("1 GiB saved: speed of the faster raw way", 0.85, "large", SAVE, *RAW),
    _fast("1 GiB saved: times Orbax's default", 2.5, "large", SAVE, *BOTH),
    _fast("1 GiB saved: times Orbax uncompressed", 2.0, "large", SAVE, PLAIN),
    _most(
        "1 GiB saved ten times: slowest / median",
        2.0,
        slowest_to_median("large", Operation.STEADY),
        "large",
        Operation.STEADY,
    ),
    _fast("1 GiB restored, warm, into numpy: speed of raw preadv", 1.0, "large", INTO_NUMPY, "raw buffered"),
    _fast("1 GiB restored, warm, into jax: times Orbax's default", 10, "large", INTO_JAX, "Orbax"),
    _fast("1 GiB restored, warm, into jax: times Orbax uncompressed", 4, "large", INTO_JAX, PLAIN),
    _fast("1 GiB restored, cold: speed of raw O_DIRECT, 8 in flight", 0.85, "large", COLD, "raw O_DIRECT"),
    _fast("10,000 leaves saved: times Orbax", 60, "small", SAVE, *BOTH),
    _fast("10,000 leaves saved for the first time: times Orbax", 60, "small", SAVE, *BOTH, ours=FIRST),
    _fast("10,000 leaves restored into numpy: times Orbax", 60, "small", INTO_NUMPY, "Orbax"),
    _fast("10,000 leaves restored into jax: times Orbax", 25, "small", INTO_JAX, "Orbax"),
    _growth("100,000 leaves saved: time a leaf / with 10,000", SAVE),
    _growth("100,000 leaves restored into jax: time a leaf / with 10,000", INTO_JAX),
    _growth("100,000 leaves restored into numpy: time a leaf / with 10,000", INTO_NUMPY),
    _fast("1 GiB saved: times safetensors", 1.3, "large", SAVE, "safetensors"),
    _fast("1 GiB restored, warm, into numpy: times safetensors", 2.0, "large", INTO_NUMPY, "safetensors"),
    _near("10,000 leaves saved: time / safetensors'", 2.0, "small", SAVE),
    _near("10,000 leaves restored into numpy: time / safetensors'", 2.0, "small", INTO_NUMPY),
    _near("10,000 leaves restored into jax: time / safetensors'", 2.0, "small", INTO_JAX),
    _most("1 GiB staged: time / Orbax's async save blocks", 1 / 5, staged_share("large"), "large", SAVE),
    _most(
        "10,000 leaves staged: time / Orbax's async save blocks", 1 / 10, staged_share("small"), "small", SAVE
    ),
    _most("1 GiB saved: extra memory / tree", 0.05, memory_share("large", SAVE), "large", SAVE),
    _most("1 GiB restored: extra memory / tree", 1.05, memory_share("large", INTO_JAX), "large", INTO_JAX),
    _most(
        "transformer saved: extra memory / tree", 0.05, memory_share("transformer", SAVE), "transformer", SAVE
    ),
    _most(
        "transformer restored: extra memory / tree",
        1.05,
        memory_share("transformer", INTO_JAX),
        "transformer",
        INTO_JAX,
    ),
    _most(
        "metadata of 10,000 leaves: time / Orbax's",
        1 / 20,
        times_its_time("small", METADATA, "Orbax"),
        "small",
        METADATA,
    ),
    _most("second save, 5 % changed: bytes / first", 0.06, written_share("changed"), "changed", SECOND),
    _most("20,000 steps opened, s", 0.25, time_of("steps", OPEN), "steps", OPEN),
    _fast("20,000 steps opened: times Orbax", 10, "steps", OPEN, "Orbax"),
    _most(
        "best of 20,000 steps: time / scandir and a read of each file",
        3,
        times_its_time("steps", BEST, "raw scandir"),
        "steps",
        BEST,
    ),
    _least("1 GiB restored, warm, into jax: speed of raw preadv", 0.9, speed_of_raw("large")),
    _least("1 GiB restored by a one-shot call: the same", 0.9, speed_of_raw("large", ONE_SHOT)),
    _fast("512 MiB saved: speed of the faster raw way", 0.95, "half", SAVE, *RAW),
    Bar(
        "512 MiB saved: times safetensors, the median of ten pairs",
        "at least",
        1.0,
        pairs_as_fast("half", SAVE, "safetensors"),
        "half",
        SAVE,
    ),
    _most(
        "512 MiB saved: CPU seconds / raw O_DIRECT's with one copy and one crc32c",
        1.2,
        cpu_share("half", SAVE, "raw O_DIRECT, crc32c"),
        "half",
        SAVE,
    ),
    _least("512 MiB restored, warm, into jax: speed of raw preadv", 0.9, speed_of_raw("half"), "half"),
    _least("512 MiB restored by a one-shot call: the same", 0.9, speed_of_raw("half", ONE_SHOT), "half"),
    _staged("", 1.5),
    _staged(" by penstock.orbax's AsyncCheckpointer", 5, FACE_ASYNC),
    _staged(" by penstock.orbax's CheckpointManager", 5, FACE_MANAGER),
    *[
        _most(
            f"{what} by penstock.orbax's {name}: blocks / Orbax's",
            1.0,
            staged_share(workload, ours, theirs),
            workload,
            SAVE,
        )
        for workload, what in (
            ("half", "512 MiB"),
            ("transformer", "transformer"),
            ("small", "10,000 leaves"),
        )
        for name, ours, theirs in (
            ("AsyncCheckpointer", FACE_ASYNC, "Orbax async"),
            ("CheckpointManager", FACE_MANAGER, "Orbax manager"),
        )
    ],
    *[
        _most(
            f"{what} restored into jax by penstock.orbax: time / penstock's own",
            1.1,
            beside_its_own(workload, INTO_JAX, FACE),
            workload,
            INTO_JAX,
        )
        for workload, what in (("half", "512 MiB"), ("small", "10,000 leaves"))
    ],
    _most(
        "10,000 leaves saved for the first time: µs a leaf",
        12,
        microseconds_per_leaf("small", SAVE, FIRST),
        "small",
        SAVE,
    ),
    _most(
        "10,000 leaves restored into jax by a one-shot call: µs a leaf",
        18,
        microseconds_per_leaf("small", INTO_JAX, ONE_SHOT),
        "small",
        INTO_JAX,
    ),
    *[
        _most(f"a million leaves {what}, s", limit, time_of("million", operation), "million", operation)
        for what, limit, operation in (
            ("saved", 12, SAVE),
            ("restored", 10, INTO_NUMPY),
            ("looked at", 4, METADATA),
        )
    ],
    _growth("a million leaves saved: time a leaf / with 100,000", SAVE, "million", "many"),
    _most(
        "a million leaves saved: extra memory, bytes a leaf",
        400,
        memory_per_leaf("million", SAVE),
        "million",
        SAVE,
    ),
    _fast(
        "transformer saved by penstock.orbax, with its codec: times Orbax's default",
        1.3,
        "transformer",
        SAVE,
        "Orbax async",
        ours=FACE_ASYNC,
    ),
    _most(
        "transformer saved by penstock.orbax, with its codec: bytes / Orbax's",
        1.0,
        stored_share("transformer", FACE_ASYNC, "Orbax async"),
        "transformer",
        SAVE,
    ),
    _fast(
        "transformer restored into jax by penstock.orbax: times Orbax's default",
        1.3,
        "transformer",
        INTO_JAX,
        "Orbax",
        ours=FACE,
    ),
    _fast("transformer restored into jax: times safetensors", 2.0, "transformer", INTO_JAX, "safetensors"),
    _most(
        "1 GiB saved: CPU seconds / raw O_DIRECT's with one copy and one crc32c",
        1.2,
        cpu_share("large", SAVE, "raw O_DIRECT, crc32c"),
        "large",
        SAVE,
    ),
    _most(
        "192 MiB each ten seconds: slow-down of training, %",
        2.0,
        slow_down_percent("beside", BESIDE_10),
        "beside",
        BESIDE_10,
    ),
    *[
        _most(
            f"{n:,} leaves over 8 devices {what}: µs a shard beside jax's own calls",
            limit,
            beside_jax(f"shards-{n}", operation, 8, ours),
            f"shards-{n}",
            operation,
        )
        for n in (1000, 4000)
        for what, limit, operation, ours in (
            ("saved", 5, SAVE, OURS),
            ("saved for the first time", 10, SAVE, FIRST),
            ("restored", 8, INTO_JAX, OURS),
        )
    ],
    *[_stall("1 GiB", "large", loop) for loop in LOOPS],
    *[_stall("10,000 leaves", "small", loop) for loop in LOOPS],
    *[_stall("10,000 leaves from the first call", "first", loop) for loop in LOOPS],
)
