"""The picture of docs/reference/scale.md: seconds by the number of processes, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.bench.plot import STYLE, text

WIDTH, HEIGHT = 1000, 430
LEFT, RIGHT, TOP, BOTTOM = 76, 250, 76, 370
PROCESSES: Final = (4, 16_000)
SECONDS: Final = (0.003, 30.0)


@dataclass(frozen=True)
class Line:
    """One quantity, by the number of processes."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]  #: processes, seconds
    is_joined: bool = True


def draw(found: Any) -> str:
    """Return the picture as an SVG document."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        "<title>What many processes cost</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(LEFT, 34, "One save by many processes, simulated on one machine", "title"),
        text(LEFT, 56, "Seconds by the number of processes. The dots stand for one tree each.", "subtitle"),
        *_axes(),
    ]
    for number, line in enumerate(lines(found)):
        parts += _line(line, TOP + 20 + 22 * number)

    return "\n".join([*parts, "</svg>"]) + "\n"


def lines(found: Any) -> list[Line]:
    """Return what is drawn."""
    trees = found["trees"]
    return [
        Line("all agree, by jax's service", "#2563eb", _points(found["service"], "wall_s")),
        Line("all agree, in memory", "#60a5fa", _points(found["memory"], "wall_s")),
        Line("primary, first save of a tree", "#ea580c", _points(trees, "first_s"), is_joined=False),
        Line("primary, next saves", "#0d9488", _points(trees, "again_s"), is_joined=False),
        Line("a reader opens it", "#a855f7", _points(trees, "open_s"), is_joined=False),
    ]


def _points(rows: Sequence[Any], name: str) -> list[tuple[float, float]]:
    return [(row["processes"], row[name]) for row in rows]


def _axes() -> Iterator[str]:
    for power in range(1, 5):
        x, y = _place(10**power, SECONDS[0])
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="#e2e8f0"/>'
        yield text(x, y + 20, f"{10**power:,}", "small", anchor="middle")

    for power in range(-2, 2):
        x, y = _place(PROCESSES[0], 10**power)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>'
        yield text(x - 8, y + 4, f"{10.0**power:g} s", "small", anchor="end")

    yield text((LEFT + WIDTH - RIGHT) / 2, BOTTOM + 42, "processes", "small", anchor="middle")


def _line(line: Line, legend: float) -> Iterator[str]:
    places = [_place(*point) for point in line.points]
    if line.is_joined and len(places) > 1:
        path = " ".join([f"{x:.1f},{y:.1f}" for x, y in places])
        yield f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}"/>'

    at = WIDTH - RIGHT + 24
    yield f'<circle cx="{at}" cy="{legend - 4:.1f}" r="4" fill="{line.colour}"/>'
    yield text(at + 12, legend, line.label)


def _place(processes: float, seconds: float) -> tuple[float, float]:
    """Return where a point lies in the picture."""
    across = _share(processes, PROCESSES)
    return LEFT + across * (WIDTH - RIGHT - LEFT), BOTTOM - _share(seconds, SECONDS) * (BOTTOM - TOP)


def _share(value: float, ends: tuple[float, float]) -> float:
    low, high = map(math.log, ends)
    return min(max((math.log(value) - low) / (high - low), 0.0), 1.0)
