"""One save as a picture: when each stage worked, with the training steps above."""

from __future__ import annotations

__all__ = ("Lane", "Timeline", "draw", "timeline_of")

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from xml.sax.saxutils import escape

from penstock.cli.terminal import format_bytes
from penstock.demo.process import TrainingLog
from penstock.demo.records import DurableSave
from penstock.kernel import Span, bottleneck
from penstock.kernel.words import counted

WIDTH = 1180
LEFT = 190  # of the plot
RIGHT = 1080
TOP = 144
LANE = 26
GAP = 6  # between the lanes of different stages
STEP_COLOUR = "#94a3b8"
COLOURS = ("#2563eb", "#7c3aed", "#0891b2", "#65a30d", "#ea580c", "#db2777", "#b45309", "#0d9488", "#4f46e5")
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)

STYLE = """
text { font-family: "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; font-size: 12px; fill: #334155 }
.title { font-size: 19px; font-weight: 600; fill: #0f172a }
.subtitle { font-size: 13px; fill: #475569 }
.lane { font-size: 13px }
.small { font-size: 11px; fill: #64748b }
.slow { font-weight: 700; fill: #b91c1c }
.inside { font-size: 11px; fill: #ffffff }
.milestone { font-size: 11px; font-weight: 600; fill: #0f172a }
.milestone { paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
"""


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the picture: one worker of one stage, or the training steps."""

    name: str
    colour: str
    note: str  #: at its right end
    bars: tuple[tuple[float, float, str], ...]  #: start and end in ms, and what is written inside
    emphasised: bool = False
    first: bool = True  #: of its stage


@dataclass(frozen=True, slots=True)
class Timeline:
    """The content of the picture; times in milliseconds from the call of `save`."""

    title: str
    subtitle: str
    lanes: tuple[Lane, ...]
    milestones: tuple[tuple[float, str], ...]  #: in order
    start: float
    end: float


def timeline_of(log: TrainingLog, save: DurableSave) -> Timeline:
    """Arrange the record of a save for drawing."""

    def ms(moment: float) -> float:
        return (moment - save.called) * 1e3

    slowest = bottleneck(save.stages)
    steps = tuple((ms(step.start), ms(step.end), f"step {step.step}") for step in log.steps)
    lanes = [Lane("training", STEP_COLOUR, "", steps)]
    for at, stage in enumerate(save.stages):
        workers = sorted({span.worker for span in stage.spans} or {0})
        for worker in workers:
            bars = tuple(_bars([span for span in stage.spans if span.worker == worker], save.called))
            busy = sum(end - start for start, end, _ in bars)
            name = stage.name if len(workers) == 1 else f"{stage.name} {worker + 1}"
            colour, slow = COLOURS[at % len(COLOURS)], stage.name == slowest
            lanes.append(Lane(name, colour, _duration(busy), bars, slow, worker == workers[0]))

    durable, n = save.durable_s * 1e3, log.steps_during(save)
    during = counted(n, "training step") if n else "no training steps"
    return Timeline(
        f"One save of penstock while training goes on: step {save.step}",
        f"{save.n_leaves} leaves, {format_bytes(save.nbytes)}; staged after {save.staged_s * 1e3:.0f} ms, "
        f"durable after {durable:.0f} ms; {during} ended meanwhile; "
        f"bottleneck: {slowest}",
        tuple(lanes),
        ((0.0, "save()"), *sorted((ms(moment), name) for name, moment in save.milestones.items())),
        -0.12 * durable,
        1.12 * durable,
    )


def _bars(spans: Sequence[Span], origin: float) -> Iterator[tuple[float, float, str]]:
    for span in spans:
        yield (span.start - origin) * 1e3, (span.end - origin) * 1e3, ""


def draw(timeline: Timeline) -> str:
    """Return the picture as an SVG document."""
    tops = list(_tops(timeline.lanes))
    bottom = tops[-1] + LANE + 8
    height = bottom + 62
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(timeline.title)}</title>",
        f"<style>{STYLE}</style>",
        f'<clipPath id="plot"><rect x="{LEFT}" y="0" width="{RIGHT - LEFT}" height="{height}"/></clipPath>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(28, 38, timeline.title, "title"),
        _text(28, 62, timeline.subtitle, "subtitle"),
        *_axis(timeline, bottom),
        *chain.from_iterable(map(_lane, repeat(timeline), timeline.lanes, tops)),
        *_milestones(timeline, bottom),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _tops(lanes: Sequence[Lane]) -> Iterator[float]:
    top = float(TOP)
    for at, lane in enumerate(lanes):
        if at:
            top += LANE + (GAP if lane.first else 2) + (GAP if at == 1 else 0)

        yield top


def _x(timeline: Timeline, ms: float) -> float:
    return LEFT + (ms - timeline.start) / (timeline.end - timeline.start) * (RIGHT - LEFT)


def _axis(timeline: Timeline, bottom: float) -> Iterator[str]:
    span = timeline.end - timeline.start
    tick = next((step for step in TICKS_MS if span / step <= 12), span / 10)
    for at in range(math.ceil(timeline.start / tick), math.floor(timeline.end / tick) + 1):
        x = _x(timeline, at * tick)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom:.0f}" stroke="#e2e8f0"/>'
        yield _text(x, bottom + 18, f"{at * tick:g}", "small", anchor="middle")

    yield _text(RIGHT, bottom + 42, "milliseconds since save() was called", anchor="end")
    yield _text(28, bottom + 42, "Bars: stages at work, waits for the disk included. Red: the busiest.")
    yield _text(RIGHT + 12, TOP - 18, "busy", "small")


def _lane(timeline: Timeline, lane: Lane, top: float) -> Iterator[str]:
    middle = top + LANE / 2 + 4
    style = "lane slow" if lane.emphasised else "lane"
    yield f'<g id="{escape(lane.name.replace(" ", "-"))}">'
    yield f'<rect x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{LANE}" fill="#f1f5f9" opacity="0.6"/>'
    yield _text(LEFT - 14, middle, lane.name, style, anchor="end")
    yield _text(RIGHT + 12, middle, lane.note, "small slow" if lane.emphasised else "small")
    for start, end, inside in lane.bars:
        if end < timeline.start or start > timeline.end:
            continue

        left = _x(timeline, max(start, timeline.start))
        right = _x(timeline, min(end, timeline.end))
        width = max(right - left, 1.5)
        yield (
            f'<rect x="{left:.2f}" y="{top + 3}" width="{width:.2f}" height="{LANE - 6}" rx="2" '
            f'fill="{lane.colour}" clip-path="url(#plot)"/>'
        )
        if inside and width > 7 * len(inside):
            yield _text(left + width / 2, middle, inside, "inside", anchor="middle")

    yield "</g>"


def _milestones(timeline: Timeline, bottom: float) -> Iterator[str]:
    """The lines first, so that none of them crosses out a label."""
    free_from = [0.0, 0.0, 0.0]  # of the rows of labels, from below
    labels: list[str] = []
    for moment, name in timeline.milestones:
        x = _x(timeline, moment)
        row = next((at for at, free in enumerate(free_from) if x >= free), 0)
        free_from[row] = x + 7 * len(name) + 10
        y = TOP - 18 - 16 * row
        labels.append(_text(x, y, name, "milestone"))
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 4}" y2="{bottom:.0f}" stroke="#0f172a" '
            'stroke-dasharray="3 3" opacity="0.7"/>'
        )

    yield from labels


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _duration(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"
