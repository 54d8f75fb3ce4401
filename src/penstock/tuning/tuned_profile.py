"""What was measured as a profile: TOML with the figures as comments, and a picture of them."""

from __future__ import annotations

__all__ = ("profile_text", "tuned_svg")

from collections.abc import Sequence
from html import escape
from statistics import median
from typing import Final

from penstock.configuration.option_reference import as_toml
from penstock.tuning.search import Comparison, Timing, Tuned

_WIDTH, _LEFT, _ROW = 720, 300, 22
_UNITS: Final = {"piece_bytes": "bytes", "limit_bytes": "bytes"}


def profile_text(name: str, tuned: Tuned, about: Sequence[str]) -> str:
    """Return the tables of a profile.

    Args:
        name: Of the profile.
        tuned: What was found.
        about: Lines about what was measured, for the comment.
    """
    lines = [f"# {line}" for line in about]
    lines += [f"# {line}" for line in _figures(tuned)]
    lines.append(f"[profiles.{name}]")
    tables: dict[str, list[str]] = {}
    for key, value in tuned.options.items():
        section, _, option = key.rpartition(".")
        tables.setdefault(section, []).append(f"{option} = {as_toml(value, _UNITS.get(option, ''))}")

    for section, options in tables.items():
        lines += ["", f"[profiles.{name}.{section}]", *options]

    return "\n".join(lines) + "\n"


def tuned_svg(tuned: Tuned) -> str:
    """Return a bar for each option that was tried: its time as a part of that of the best before it."""
    high = _ROW * (len(tuned.tried) + 1) + 20
    scale = (_WIDTH - _LEFT - 60) / 2
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{high}" font-size="12">']
    for at, tried in enumerate(tuned.tried):
        ratio = tried.ratio(tried.flow)
        y = 10 + _ROW * at
        colour = "#2563eb" if tried.is_faster else "#94a3b8"
        words = f"{tried.flow}: {_said(tried)}"
        lines.append(f'<text x="4" y="{y + 12}">{escape(words)}</text>')
        lines.append(
            f'<rect x="{_LEFT}" y="{y}" width="{scale * min(ratio, 2):.0f}" height="15" fill="{colour}"/>'
        )
        lines.append(f'<text x="{_LEFT + scale * min(ratio, 2) + 4:.0f}" y="{y + 12}">{ratio:.2f}</text>')

    end = 10 + _ROW * len(tuned.tried)
    lines.append(
        f'<line x1="{_LEFT + scale:.0f}" x2="{_LEFT + scale:.0f}" y1="4" y2="{end}" stroke="#475569"/>'
        f'<text x="4" y="{end + 12}">time, as a part of that without the option; blue: kept</text></svg>'
    )
    return "".join(lines)


def _figures(tuned: Tuned) -> list[str]:
    lines = [f"{tried.flow}, {_said(tried)}: {_both(tried)}" for tried in tuned.tried]
    if tuned.final is not None:
        save, restore = tuned.final.ratio("save"), tuned.final.ratio("restore")
        lines.append(f"All together: saves take {save:.2f} and restores {restore:.2f} of the time without.")
    if not tuned.options:
        lines.append("Nothing is faster beyond noise than what is set already.")
    if not tuned.complete:
        lines.append("There was no time for every candidate.")

    return lines


def _said(tried: Comparison) -> str:
    return ", ".join(
        f"{key} = {as_toml(value, _UNITS.get(key.rpartition('.')[2], ''))}"
        for key, value in tried.options.items()
    )


def _both(tried: Comparison) -> str:
    before, after = _median(tried, tried.before), _median(tried, tried.after)
    return f"{before:.3f} s -> {after:.3f} s{', kept' if tried.is_faster else ''}"


def _median(tried: Comparison, timings: Sequence[Timing]) -> float:
    return median(tried.seconds(timings, tried.flow))
