"""The results as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.bench.bars import Verdict
from tests.bench.results import Operation, Profile, Results, Size, Spread, spread
from tests.bench.units import amount, figure, microseconds, seconds

HEADINGS = (
    "",
    "runs",
    "time: median (min..max)",
    "MiB/s",
    "µs/leaf",
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
    parts = [_machine(machine)]
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


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['date']}, commit {machine['commit'] or 'unknown'}\n"
        f"{machine['cores']} cores ({machine['processor'] or 'unknown'}), {amount(machine['memory_bytes'])}, "
        f"Linux {machine['kernel']}, {machine['file_system']}\n"
        f"Python {machine['python']}, {versions}"
    )


def _workload(results: Results, size: Size, labels: Sequence[str]) -> str:
    lines = [f"{size.workload}: {size.title} ({size.n_leaves:,} leaves, {amount(size.nbytes)})"]
    rows: list[tuple[str, ...]] = [HEADINGS]
    for operation in ORDER:
        found = [row for label in labels if (row := _row(results, size, label, operation))]
        if found:
            rows.append((str(operation), *[""] * (len(HEADINGS) - 1)))
            rows.extend(found)

    lines.append(aligned(rows))
    floor = [
        stall.seconds for stall in results.stalls if stall.workload == size.workload and not stall.operation
    ]
    if floor:
        lines.append(f"noise floor of the event loop: {seconds(max(floor))}")

    lines.extend(
        f"{'FAILED ' if note.failed else ''}{note.contender}: {note.text}"
        for note in results.notes
        if note.workload == size.workload
    )

    return "\n".join(lines)


def _row(results: Results, size: Size, label: str, operation: Operation) -> tuple[str, ...] | None:
    times = results.seconds(size.workload, label, operation)
    taken = spread(times)
    if taken is None:
        return None

    memory = results.extra_memory(size.workload, label, operation)
    written = spread(results.written(size.workload, label, operation))
    stalls = spread(results.stalled(size.workload, label, operation))
    speed = "" if operation is Operation.METADATA else f"{size.nbytes / taken.median / 2**20:,.0f}"
    return (
        f"  {label}",
        str(len(times)),
        ranged(taken),
        speed,
        microseconds(taken.median / size.n_leaves),
        ranged(spread(results.staged(size.workload, label, operation))),
        f"{written.median / size.nbytes:.1%}" if written else "",
        f"{amount(memory.extra_bytes)} ({memory.extra_bytes / size.nbytes:.0%})" if memory else "",
        ranged(stalls),
    )


def ranged(found: Spread | None) -> str:
    """Median and range, in one unit."""
    if found is None:
        return ""

    unit, factor = ("s", 1.0) if found.median >= 1 else ("ms", 1e3)
    median, low, high = (figure(value * factor) for value in (found.median, found.low, found.high))
    return f"{median} {unit} ({low}..{high})"


def _bars(verdicts: Sequence[Verdict]) -> str:
    rows = [("bar", "wanted", "measured", "")]
    for verdict in verdicts:
        measured = "" if verdict.measured is None else figure(verdict.measured)
        rows.append((verdict.text, verdict.wanted, measured, verdict.verdict))

    return aligned(rows, left=2)


def _profiles(results: Results, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Where the time goes in what falls short."""
    short = {(verdict.workload, verdict.operation) for verdict in verdicts if verdict.verdict == "short"}
    for profile in results.profiles:
        if (profile.workload, profile.operation) in short:
            yield _profile(profile)


def _profile(profile: Profile) -> str:
    rows = [("stage", "busy", "starved", "blocked")]
    rows.extend(
        (stage.name, seconds(stage.busy_s), seconds(stage.starved_s), seconds(stage.blocked_s))
        for stage in profile.stages
    )

    title = f"where the time goes: {profile.workload}, {profile.operation}, one of {seconds(profile.seconds)}"
    return f"{title} (summed over a stage's workers)\n{aligned(rows)}"
