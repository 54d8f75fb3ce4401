"""The results as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.bench.bars import Verdict
from tests.bench.loops import LOOPS
from tests.bench.noise import warning
from tests.bench.results import IDLE, Operation, Profile, Results, Size, Spread, spread
from tests.bench.units import amount, figure, microseconds, seconds

HEADINGS = (
    "",
    "runs",
    "time: median (min..max)",
    "MiB/s",
    "µs/leaf",
    "CPU s/GiB",
    "staged",
    "written",
    "extra memory",
    "stall",
)
QUICK = "A quick run: smaller trees. The bars are about the full sizes, so nothing follows from them here."
ORDER = tuple(Operation)


def render(
    results: Results,
    verdicts: Sequence[Verdict],
    machine: dict[str, Any],
    labels: Sequence[str],
    *,
    quick: bool = False,
) -> str:
    """Return the whole report."""
    parts = [_machine(machine), *filter(None, [warning(results.quiet)])]
    if quick:
        parts.append(QUICK)

    parts.extend(_workload(results, size, labels) for size in results.sizes)
    parts.append(_bars(verdicts))
    parts.extend(_profiles(results, verdicts))
    return "\n\n".join(parts) + "\n"


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns of equal width, the first `left` of them flush left."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def amounts(size: Size) -> str:
    """`8 leaves, 1 GiB`, or `20,000 steps`."""
    if size.unit != "leaf":
        return f"{size.n_leaves:,} {size.unit}s"

    return f"{size.n_leaves:,} leaves, {amount(size.nbytes)}"


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['date']}, commit {machine['commit'] or 'unknown'}\n"
        f"{machine['cores']} cores ({machine['processor'] or 'unknown'}), {amount(machine['memory_bytes'])}, "
        f"Linux {machine['kernel']}, {machine['file_system']}\n"
        f"Python {machine['python']}, {versions}"
    )


def _workload(results: Results, size: Size, labels: Sequence[str]) -> str:
    lines = [f"{size.workload}: {size.title} ({amounts(size)})"]
    lines.extend(
        f"just before: load average {quiet.load_1:.2f}, {quiet.busy_cores:.2f} processors busy"
        for quiet in results.quiet
        if quiet.workload == size.workload
    )
    rows: list[tuple[str, ...]] = [tuple(name.replace("leaf", size.unit) for name in HEADINGS)]
    for operation in ORDER:
        found = [row for label in labels if (row := _row(results, size, label, operation))]
        if found:
            rows.append((str(operation), *[""] * (len(HEADINGS) - 1)))
            rows.extend(found)

    if rows[1:]:
        lines.append(aligned(rows))

    stalls = list(_stalls(results, size.workload, labels))
    if stalls:
        lines.append(_stall_table(stalls))

    lines.extend(
        f"{'FAILED ' if note.failed else ''}{note.contender}: {note.text}"
        for note in results.notes
        if note.workload == size.workload
    )

    return "\n".join(lines)


def _stall_table(rows: Sequence[dict[str, str]]) -> str:
    operations = [operation for operation in ORDER if any(operation in row for row in rows)]
    columns = {"": "longest stall of the event loop", "loop": "loop", IDLE: "idle (noise floor)"}
    columns.update((operation, str(operation)) for operation in operations)
    return aligned([[*columns.values()], *([row.get(key, "") for key in columns] for row in rows)])


def _stalls(results: Results, workload: str, labels: Sequence[str]) -> Iterator[dict[str, str]]:
    """A row for each contender and event loop: what each operation did to it, and doing nothing."""
    for label in labels:
        for loop in LOOPS:
            found = {
                operation: ranged(spread(results.stalled(workload, label, operation, loop)))
                for operation in (IDLE, *ORDER)
            }
            if any(found.values()):
                yield {"": f"  {label}", "loop": loop, **{key: text for key, text in found.items() if text}}


def _row(results: Results, size: Size, label: str, operation: Operation) -> tuple[str, ...] | None:
    times = results.seconds(size.workload, label, operation)
    taken = spread(times)
    if taken is None:
        return None

    memory = results.extra_memory(size.workload, label, operation)
    written = spread(results.written(size.workload, label, operation))
    stalls = spread(results.stalled(size.workload, label, operation))
    moves_bytes = size.nbytes and operation is not Operation.METADATA
    speed = f"{size.nbytes / taken.median / 2**20:,.0f}" if moves_bytes else ""
    return (
        f"  {label}",
        str(len(times)),
        ranged(taken),
        speed,
        microseconds(taken.median / size.n_leaves),
        _cpu(results, size, label, operation),
        ranged(spread(results.staged(size.workload, label, operation))),
        f"{written.median / size.nbytes:.1%}" if written else "",
        f"{amount(memory.extra_bytes)} ({memory.extra_bytes / size.nbytes:.0%})" if memory else "",
        ranged(stalls),
    )


def _cpu(results: Results, size: Size, label: str, operation: Operation) -> str:
    found = spread(results.cpu(size.workload, label, operation))
    return figure(found.median / size.nbytes * 2**30) if found and size.nbytes else ""


def ranged(found: Spread | None) -> str:
    """Median and range, in one unit."""
    if found is None:
        return ""

    unit, factor = ("s", 1.0) if found.median >= 1 else ("ms", 1e3) if found.median >= 1e-4 else ("µs", 1e6)
    median, low, high = (figure(value * factor) for value in (found.median, found.low, found.high))
    return f"{median} {unit} ({low}..{high})"


def _bars(verdicts: Sequence[Verdict]) -> str:
    rows = [("bar", "wanted", "measured", "", "")]
    for verdict in verdicts:
        measured = "" if verdict.measured is None else figure(verdict.measured)
        rows.append((verdict.text, verdict.wanted, measured, verdict.verdict, verdict.note))

    return aligned(rows, left=2)


def _profiles(results: Results, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Where the time goes in what falls short."""
    short = {(verdict.workload, verdict.operation) for verdict in verdicts if verdict.verdict == "short"}
    for profile in results.profiles:
        if (profile.workload, profile.operation) in short:
            yield _profile(profile)


def _profile(profile: Profile) -> str:
    rows = [("stage", "busy", "starved", "blocked", "memory_wait")]
    rows.extend(
        (
            stage.name,
            seconds(stage.busy_s),
            seconds(stage.starved_s),
            seconds(stage.blocked_s),
            seconds(stage.memory_wait_s),
        )
        for stage in profile.stages
    )

    title = f"where the time goes: {profile.workload}, {profile.operation}, one of {seconds(profile.seconds)}"
    return f"{title} (summed over a stage's workers)\n{aligned(rows)}"
