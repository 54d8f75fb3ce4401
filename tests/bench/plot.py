"""The medians and ranges as a picture: a row for each workload, a panel for each operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from tests.bench.results import Operation, Results, Size, Spread, spread
from tests.bench.table import amounts
from tests.bench.units import seconds

PANELS = (Operation.SAVE, Operation.RESTORE_JAX, Operation.RESTORE_NUMPY)
STEP_PANELS = (Operation.OPEN, Operation.ALL_STEPS, Operation.BEST)
WIDTH = 1320
LEFT = 28
NAMES = 150  # for the names of the contenders
PANEL = 382  # names not included
VALUE = 92  # for the number at the end of the longest bar
TOP = 96
TITLE = 46  # above the bars of a workload
BAR = 17
BELOW = 22
COLOURS = {
    "penstock": "#2563eb",
    "penstock.orbax": "#60a5fa",
    "Orbax": "#ea580c",
    "safetensors": "#0d9488",
    "numpy": "#65a30d",
    "raw": "#64748b",
    "jax": "#a855f7",
    "nothing": "#94a3b8",
}
"""Of contenders, by the first word of their labels."""

STYLE = """
text { font-family: "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; font-size: 12px; fill: #334155 }
.title { font-size: 19px; font-weight: 600; fill: #0f172a }
.subtitle { font-size: 13px; fill: #475569 }
.workload { font-size: 14px; font-weight: 600; fill: #0f172a }
.small { font-size: 11px; fill: #64748b }
.ours { font-weight: 600; fill: #1d4ed8 }
"""


@dataclass(frozen=True)
class Bar:
    """One contender in one panel."""

    label: str
    time: Spread


def draw(results: Results, machine: dict[str, Any], labels: Sequence[str]) -> str:
    """Return the picture as an SVG document."""
    parts: list[str] = []
    top = float(TOP)
    for size in results.sizes:
        operations = PANELS if size.unit == "leaf" else STEP_PANELS
        panels = [(operation, panel(results, size.workload, operation, labels)) for operation in operations]
        row = list(_row(size, panels, top))
        parts.extend(row)
        top += TITLE + BELOW + BAR * max(len(bars) for _, bars in panels)

    size_of = f'width="{WIDTH}" height="{top:.0f}" viewBox="0 0 {WIDTH} {top:.0f}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size_of} role="img">',
        "<title>penstock's benchmark</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{top:.0f}" fill="#ffffff"/>',
        text(LEFT, 38, "Time to save, to restore and to open: shorter is better", "title"),
        text(LEFT, 62, _subtitle(machine), "subtitle"),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def panel(results: Results, workload: str, operation: Operation, labels: Sequence[str]) -> list[Bar]:
    """The bars of one panel, in the order of `labels`."""
    found = ((label, spread(results.seconds(workload, label, operation))) for label in labels)
    return [Bar(label, time) for label, time in found if time is not None]


def _subtitle(machine: dict[str, Any]) -> str:
    return (
        f"Medians and ranges of one run; {machine['cores']} cores, {machine['file_system']}, jax "
        f"{machine['versions']['jax']} on CPU, Orbax {machine['versions']['orbax-checkpoint']}; "
        f"{machine['date']}, commit {machine['commit'] or 'unknown'}. Each panel has its own scale, from 0."
    )


def _row(size: Size, panels: Sequence[tuple[Operation, list[Bar]]], top: float) -> Iterator[str]:
    title = f"{size.title} ({amounts(size)})"
    yield f'<g id="{escape(size.workload)}">'
    yield text(LEFT, top + 14, title, "workload")
    step = (WIDTH - 2 * LEFT) / len(panels)
    for at, (operation, bars) in enumerate(panels):
        yield from _panel(operation, bars, LEFT + at * step, top + TITLE)

    yield "</g>"


def _panel(operation: Operation, bars: Sequence[Bar], left: float, top: float) -> Iterator[str]:
    if not bars:
        return

    zero = left + NAMES
    scale = (PANEL - NAMES / 2 - VALUE) / max(bar.time.high for bar in bars)
    name = "save, until durable" if operation is Operation.SAVE else str(operation)
    yield text(zero, top - 8, name, "small")
    for at, bar in enumerate(bars):
        y = top + at * BAR
        middle = y + BAR / 2
        end = zero + bar.time.median * scale
        family = bar.label.partition(",")[0].partition(" ")[0]
        style = "ours" if family == "penstock" else ""
        yield text(zero - 8, middle + 4, bar.label, style, anchor="end")
        yield (
            f'<rect x="{zero:.1f}" y="{y + 3:.1f}" width="{max(end - zero, 1):.1f}" height="{BAR - 6}" '
            f'fill="{COLOURS[family]}"/>'
        )
        low, high = zero + bar.time.low * scale, zero + bar.time.high * scale
        yield f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="#0f172a"/>'
        yield text(max(end, high) + 6, middle + 4, seconds(bar.time.median), "small")


def text(x: float, y: float, words: str, style: str = "", *, anchor: str = "start") -> str:
    """Return a line of text as an element."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
