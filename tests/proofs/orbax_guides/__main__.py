"""Run the guides of Orbax's documentation, as they are, on penstock.orbax: `make orbax-guides SOURCE=...`.

A cell counts if it runs with the installed Orbax. Of each that does not run with penstock it is said why.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

GUIDES = Path("docs", "guides", "checkpoint")
LIBRARIES = ("orbax", "penstock")
NAMED = {
    ("optimized_checkpointing", 6): "it lists `ocdbt.process_0/d`, which one process has no need of",
    ("optimized_checkpointing", 7): "as the cell before",
}
"""Cells that do not run, and why; each by its place among the cells with code."""


def notebooks(source: Path) -> Iterator[Path]:
    """Yield the notebooks of both APIs."""
    for folder in (source / GUIDES, source / GUIDES / "v1"):
        yield from sorted(folder.glob("*.ipynb"))


def run(notebook: Path, library: str, limit_s: float) -> dict[int, str]:
    """Run a notebook; return for each cell that was reached what it failed with, or nothing."""
    scratch = Path(tempfile.mkdtemp(prefix="guide-"))
    results = scratch / "results"
    command = [sys.executable, "-m", "tests.proofs.orbax_guides.one_guide", "--library", library]
    try:
        with (scratch / "output").open("w") as output:
            places = [str(notebook), str(results), str(scratch)]
            subprocess.run([*command, *places], stdout=output, stderr=output, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        pass
    finally:
        lines = results.read_text().splitlines() if results.exists() else []
        shutil.rmtree(scratch)

    return {found["cell"]: found["why"] for found in map(json.loads, lines)}


def main() -> int:
    """Run all, and print the table; return 1 if a cell does not run, and it is not said above why."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path, help="a checkout of Orbax")
    parser.add_argument("--only", default="", help="notebooks whose name contains this")
    parser.add_argument("--limit-s", type=float, default=600)
    options = parser.parse_args()
    totals, failures, unknown = [0, 0], list[str](), 0
    _say("| guide | Orbax | penstock |\n| --- | --- | --- |")
    for notebook in notebooks(options.source):
        name = str(notebook.relative_to(options.source / GUIDES).with_suffix(""))
        if options.only not in name:
            continue

        theirs, ours = (run(notebook, library, options.limit_s) for library in LIBRARIES)
        counted = [cell for cell, why in theirs.items() if not why]
        failed = {cell: ours.get(cell, "it was not reached") for cell in counted if ours.get(cell, "-")}
        for cell, why in failed.items():
            reason = NAMED.get((name, cell))
            unknown += reason is None
            failures.append(f"{name}, cell {cell}: {reason or why}")
        totals = [totals[0] + len(counted), totals[1] + len(counted) - len(failed)]
        _say(f"| {name} | {len(counted)} | {len(counted) - len(failed)} |")

    _say(f"| all | {totals[0]} | {totals[1]} |\n")
    _say("\n".join(failures))
    return int(unknown > 0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
