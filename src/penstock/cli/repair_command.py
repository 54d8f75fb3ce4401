"""`penstock repair`: writes what is intact of a damaged checkpoint into a new one."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Final

import penstock
from penstock.cli.read_progress import run_with_bar
from penstock.cli.storage_options import add_storage_options, chosen_format, said_format
from penstock.cli.terminal import Output, Table, Tone, Toned, format_bytes
from penstock.kernel.memory.memory_limit import MOST_EXPANSION
from penstock.tools.repair_report import Outcome, RepairReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Write every intact leaf of the damaged checkpoint at SOURCE into a new one at TARGET, and list "
        "what is gone. The exit status is 0 if nothing is, 1 if something is gone, and 4 if something was "
        "kept of which no checksum says that it is intact."
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint, or one step")
    parser.add_argument("target", metavar="TARGET", help="the directory, or .safetensors file, to write")
    parser.add_argument(
        "--other", action="append", default=[], metavar="STEP",
        help="another checkpoint, to take damaged leaves from where they are the same; repeatable",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace what is at TARGET, in one step")
    parser.add_argument("--memory", metavar="SIZE", help="host memory to use at most, as in 512MiB")
    add_storage_options(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Repair as the command line says, and print what became of each damaged leaf.

    Returns:
        0 if nothing is gone, 1 if something is, 4 if something was kept unchecked.

    Raises:
        PenstockError: What `penstock.repair` raises.
    """
    call = partial(
        penstock.repair,
        options.source,
        options.target,
        others=options.other,
        overwrite=options.overwrite,
        memory_limit=options.memory,
        save_format=chosen_format(options),
        max_expansion=options.max_expansion or MOST_EXPANSION,
    )
    found = run_with_bar(output, options.source, call)
    if options.json:
        output.say(json.dumps({"complete": found.complete, **asdict(found)}, indent=2))
    else:
        stored = "safetensors" if found.format == "safetensors" else said_format(options)
        _show(found, stored, output)

    return 1 if found.gone else 4 if found.unchecked else 0


def _show(found: RepairReport, stored: str, output: Output) -> None:
    others = [leaf for leaf in found.leaves if leaf.outcome != "kept"]
    facts = [(leaf.problem or "no checksum was recorded", _shown(leaf.taken_from)) for leaf in others]
    shown = list(zip(others, facts, strict=True))
    rows = [(leaf.name, Toned(leaf.outcome, _TONES[leaf.outcome]), *more) for leaf, more in shown]
    plain = [(leaf.outcome, leaf.name, *more) for leaf, more in shown]
    if rows:
        output.table(Table(("leaf", "", "problem", "taken from"), rows, n_left=4, plain=plain))

    counts = Counter(leaf.outcome for leaf in found.leaves)
    what = ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in counts)
    line = f"{found.path}: {what} ({format_bytes(found.nbytes)}; {stored})"
    if found.complete:
        output.success(line)
    else:
        output.say(line, "bad" if found.gone else "warning")


_TONES: Final[Mapping[Outcome, Tone]] = {
    "kept": "good",
    "taken": "good",
    "rebuilt": "good",
    "unchecked": "warning",
    "gone": "bad",
}


def _shown(path: str) -> str:
    """Return a path as it is typed from here, where that is shorter."""
    near = os.path.relpath(path) if path else ""
    return path if near.startswith(os.pardir) else near
