"""Runs `penstock demo` and draws what it prints as docs/demo.svg: `python docs/site/record_demo.py`.

The picture plays the run once, shortened to some seconds, and then shows its last screen. Where nothing may
move (`prefers-reduced-motion`), and where pictures are not animated, it shows that from the beginning.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parents[1] / "demo.svg"
COLUMNS, ROWS = 52, 31  # so few columns that a phone shows them
ADVANCE, LINE, MARGIN, BAR = 7.23, 16, 12, 26
TITLE = "penstock demo: a training run saves, is killed in the middle of a save, and resumes bit for bit"
LONGEST_PAUSE_S, SPEED = 1.0, 1.5  # as played

COLOURS = {"1": "strong", "2": "faint", "32": "good"}
STYLE = """
text { font: 12px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #cbd5e1;
  white-space: pre }
.strong { fill: #f1f5f9; font-weight: 700 }
.faint { fill: #94a3b8 }
.good { fill: #86efac }
.prompt { fill: #fbbf24 }
.line { animation: appear 1ms step-end backwards }
@keyframes appear { from { opacity: 0 } }
@media (prefers-reduced-motion: reduce) { .line, .screen { animation: none !important } }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the recording."""

    at_s: float  #: when it was printed, or is played
    style: str  #: a class of `STYLE`, or ""
    text: str


def record(command: Sequence[str]) -> list[Line]:
    """Run the demo on a terminal of its own, and return what it prints.

    Raises:
        SystemExit: If it fails.
    """
    ours, its = os.openpty()
    lines: list[Line] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=its, stderr=subprocess.PIPE, cwd=folder, env=environment
        )
        os.close(its)
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            held, style = b"", ""
            while True:
                try:
                    held += terminal.read(4096)
                except OSError:  # so ends a terminal on Linux
                    break

                *whole, held = held.split(b"\r\n")
                for raw in whole:
                    line, style = styled(raw.decode(), style)
                    lines.append(Line(time.monotonic() - began, *line))

        errors = process.communicate()[1]

    if process.returncode or errors:
        raise SystemExit(f"the demo ended with {process.returncode}: {errors.decode()}")

    return lines


def styled(raw: str, style: str) -> tuple[tuple[str, str], str]:
    """Return the style and the text of a line, and the style in which the next one begins."""
    codes = re.findall(r"\x1b\[([\d;]*)m", raw)
    begins = COLOURS.get(codes[0], "") if codes and raw.startswith("\x1b") else style
    ends = COLOURS.get(codes[-1], "") if codes else style
    return (begins, re.sub(r"\x1b\[[\d;]*m", "", raw)), ends


def played(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with the times at which they are shown: faster, and without long pauses."""
    at, before, found = 1.0, 0.0, list[Line]()
    for line in lines:
        at += min((line.at_s - before) / SPEED, LONGEST_PAUSE_S)
        before = line.at_s
        found.append(Line(at, line.style, line.text))

    return found


def picture(lines: Sequence[Line]) -> str:
    """Return the recording as an SVG document."""
    shown = played(lines)
    width, height = round(COLUMNS * ADVANCE) + 2 * MARGIN, BAR + ROWS * LINE + MARGIN
    rows = [Line(0.0, "prompt", "$ penstock demo"), *shown]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}{scrolling(rows)}</style>",
        f'<clipPath id="window"><rect y="{BAR + 3}" width="{width}" height="{height - BAR - 9}"/></clipPath>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#0f172a"/>',
        *(f'<circle cx="{16 + 16 * at}" cy="14" r="5" fill="#475569"/>' for at in range(3)),
        '<g clip-path="url(#window)"><g class="screen">',
        *(row(at, line) for at, line in enumerate(rows) if line.text),
        "</g></g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def row(at: int, line: Line) -> str:
    """Return one line of the picture, stretched to the grid of the terminal whatever the font."""
    length = f'textLength="{len(line.text) * ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs"'
    return (
        f'<text class="line {line.style}" x="{MARGIN}" y="{BAR + (at + 1) * LINE - 3}" {length} '
        f'style="animation-delay: {line.at_s:.2f}s">{escape(line.text)}</text>'
    )


def scrolling(rows: Sequence[Line]) -> str:
    """Return the style that moves the screen up by a line whenever one would stand below it."""
    whole = rows[-1].at_s
    above = max(0, len(rows) - ROWS)
    stops = [
        f"{rows[ROWS + at].at_s / whole * 100:.2f}% {{ transform: translateY({-(at + 1) * LINE}px) }}"
        for at in range(above)
    ]
    end = f"translateY({-above * LINE}px)"
    return (
        f".screen {{ transform: {end}; animation: scroll {whole:.2f}s step-end both }}\n"
        f"@keyframes scroll {{ 0% {{ transform: none }} {' '.join(stops)} }}\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(record([sys.executable, "-m", "penstock.cli", "demo"])))
