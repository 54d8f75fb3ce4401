"""Draws docs/benchmarks.svg, the picture of the landing page: `python docs/site/draw_benchmarks.py`.

The figures are those of the decision page "Speed", one run of `make bench` at commit 4824937.
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parents[1] / "benchmarks.svg"
PANELS: tuple[tuple[str, dict[str, float]], ...] = (
    ("Save 1 GiB", {"penstock": 0.33, "safetensors": 0.47, "Orbax, uncompressed": 0.74, "Orbax": 2.26}),
    ("Restore 1 GiB", {"penstock": 0.16, "safetensors": 0.42, "Orbax, uncompressed": 0.61, "Orbax": 1.17}),
    ("Save 10,000 arrays of 1 KiB", {"penstock": 0.095, "safetensors": 0.076, "Orbax": 11.6}),
    ("Restore 10,000 arrays of 1 KiB", {"penstock": 0.078, "safetensors": 0.053, "Orbax": 4.96}),
    ("Longest stall of the event loop", {"penstock": 0.0053, "safetensors": 2.0, "Orbax": 10.5}),
)
"""Seconds, by operation and library."""

COLOURS = {"penstock": "#2563eb", "safetensors": "#0d9488", "Orbax": "#ea580c"}
WIDTH, LEFT, BAR_LEFT, BAR_WIDTH = 400, 8, 146, 190  # so narrow that a phone shows it
ROW, GAP, TOP = 17, 34, 14

STYLE = """
text { font: 13px "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; fill: #334155 }
.title { font-weight: 600; fill: #0f172a }
.ours { font-weight: 600; fill: #1d4ed8 }
"""


def shown(seconds: float) -> str:
    """Seconds as people read them."""
    return (
        f"{seconds * 1000:.0f} ms"
        if seconds < 0.1
        else f"{seconds:.2g} s"
        if seconds < 10
        else f"{seconds:.1f} s"
    )


def panel(title: str, times: dict[str, float], top: int) -> list[str]:
    """The lines of one operation. Each has a scale of its own: its longest time fills the width."""
    lines = [f'<text class="title" x="{LEFT}" y="{top}">{title}</text>']
    for at, (name, time) in enumerate(times.items()):
        y = top + 7 + at * ROW
        width = max(2.0, BAR_WIDTH * time / max(times.values()))
        ours = ' class="ours"' if name == "penstock" else ""
        colour = COLOURS[name.partition(",")[0]]
        lines += [
            f'<text{ours} x="{LEFT}" y="{y + 12}">{name}</text>',
            f'<rect x="{BAR_LEFT}" y="{y + 2}" width="{width:.1f}" height="12" rx="2" fill="{colour}"/>',
            f'<text{ours} x="{BAR_LEFT + width + 6:.1f}" y="{y + 12}">{shown(time)}</text>',
        ]

    return lines


def picture() -> str:
    """The whole picture."""
    lines: list[str] = []
    top = TOP + 8
    for title, times in PANELS:
        lines += panel(title, times, top)
        top += len(times) * ROW + GAP

    height = top - GAP + 22
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    title = "<title>Seconds to save and to restore, and the longest stall</title>"
    back = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", back, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
