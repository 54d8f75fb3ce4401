"""`penstock verify`: compares everything under a path with the checksums of what was written."""

from __future__ import annotations

__all__ = ("STATUSES", "configure", "run")

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import penstock
from penstock.checkpointer.parts import config_and_regulator
from penstock.cli.read_progress import run_with_bar
from penstock.cli.terminal import Output, Table, Tone, Toned, format_bytes, say_error
from penstock.handlers.formats.verification import Finding
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.inspection.looking import run_here
from penstock.inspection.stored_leaves import ItemFacts, read_items
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.protocols.stores import Store
from penstock.kernel.rules import MADE_BY
from penstock.kernel.words import counted
from penstock.steps.tier_record import SeenLevel, levels_of
from penstock.stores.store_finder import store_of
from penstock.verification.verify import Status, Verification, VerifyReport

if TYPE_CHECKING:
    from penstock.tools.remaking import RemadeReport

STATUSES: Final[Mapping[Status, int]] = {
    "intact": 0,
    "damaged": 1,
    "absent": 3,
    "unchecked": 4,
    "unreadable": 5,
}
"""The exit status for each result. 2 is wrong usage, as of every command."""

_DIFFERS: Final = 6
"""If all is as it was written, and not what the rules by which it was made give now."""

_RANKS: Final[Sequence[Status]] = ("damaged", "unreadable", "unchecked", "absent", "intact")
"""The worst first."""

_KINDS: Final = {
    "damages": "damaged",
    "unreadable": "unreadable",
    "absent": "absent",
    "unchecked": "unchecked",
}
"""Names in the JSON document, and the kinds of the findings that they list."""

_MOST_LEAVES: Final = 3  # named in a row; the JSON document names all
_SUMMARIES: Final[Mapping[Status, str]] = {
    "damaged": "DAMAGED",
    "unreadable": "NOT READ AS A WHOLE",
    "absent": "NO CHECKPOINT",
    "unchecked": "NOT CHECKED AS A WHOLE",
    "intact": "intact",
}


_TONES: Final[Mapping[str, Tone]] = {
    "damaged": "bad",
    "unreadable": "bad",
    "absent": "warning",
    "unchecked": "warning",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Compare everything at and below PATH with the checksums recorded of it: every step, every item, "
        "every file; of a run with tiers, in these, too. The exit status is 0 if all of it is intact, 1 if "
        "something is damaged, 3 if there is no checkpoint, 4 if something has no checksum, 5 if the "
        "medium refused to read something, and 6 if it is intact, and rules that made it give something else "
        "of the source that is there now."
    )
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint, a directory of steps, or a folder of these"
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--source", metavar="PATH",
        help=(
            "where the checkpoint is now of which rules made this one; by default where it was, if that is a "
            "disk: what rules made is made again, and compared"
        ),
    )  # fmt: skip
    sources.add_argument("--no-sources", action="store_true", help="do not make it again")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Check everything under a path, and print what is not as it was written, or cannot be checked.

    Returns:
        The exit status, by what is worst: see `STATUSES`.
    """
    try:
        levels = _levels(options.path)
        found = run_with_bar(output, options.path, partial(_verify, options.path))
        tiers = [
            run_with_bar(output, level.path, partial(_verify, level.path))
            for level in levels
            if level.store is not None and level.steps
        ]
        made = [] if options.no_sources else _remade(found, options.source, output)
    except (penstock.PenstockError, OSError) as error:
        say_error(error)  # status 1 would say that there is damage
        return STATUSES["unreadable"]

    if options.json:
        document = _document(found)
        if made:
            document["made_by_rules"] = [asdict(each) for each in made]
        if levels:
            document["tiers"] = [_document(tier) for tier in tiers]

        output.say(json.dumps(document, indent=2))
    else:
        for each in (found, *tiers):
            _show(each, output)
        for level in levels:
            if level.store is None:
                output.say(f"{level.path}: not looked at ({level.problem})", "warning")
        for remade in made:
            _show_made(remade, output)

    # A root that has no step yet, while its tiers have some, says nothing.
    statuses = [each.status for each in (found, *tiers) if not (tiers and each.status == "absent")]
    status = next(STATUSES[status] for status in _RANKS if status in statuses)
    return _DIFFERS if status == 0 and any(each.differing for each in made) else status


def _remade(found: VerifyReport, source: str | None, output: Output) -> list[RemadeReport]:
    """Make again what rules made of checkpoints that are there.

    A recorded place in a bucket is no reason to go there: the writer of a checkpoint can record any.
    """
    reports: list[RemadeReport] = []
    damaged = {finding.file for finding in found.findings if finding.kind != "unchecked"}
    for path in found.checkpoints:
        if any(file.startswith(path) for file in damaged):
            continue  # that is said already

        store, final = store_of(path)
        items = run_here(store, partial(_items, store, final))
        custom = items[0].custom_metadata if items else None
        if MADE_BY not in (custom or {}):
            continue

        from penstock.tools.remaking import (  # it loads jax, which few checkpoints need
            RemadeReport,
            made_record,
            remake,
        )

        record = made_record(custom)
        if record is None:
            continue

        recorded = record["source"]
        if source is None and scheme_of(recorded) is not None:
            problem = "it is in a bucket, where it is looked for if --source says so"
            reports.append(RemadeReport(final, recorded, len(record["rules"]), problem=problem))
            continue

        there, place = store_of(source or recorded)
        _, memory = config_and_regulator(None, {})
        call = partial(remake, (store, there), Threads(), memory, final, place, record)
        reports.append(run_with_bar(output, place, call))

    return reports


async def _items(store: Store, path: str, threads: Threads) -> list[ItemFacts]:
    return await read_items(store, threads, path)


def _show_made(made: RemadeReport, output: Output) -> None:
    said = f"{made.path}: made of {made.source} by {counted(made.n_rules, 'rule')}"
    if made.problem is not None:
        output.say(f"{said}, and not made again: {made.problem}")
        return

    compared = counted(len(made.same) + len(made.differing), "leaf", "leaves")
    if made.changed:
        listed = _leaves(made.changed)
        output.say(f"{said}; its source is another one by now, so not made again: {listed}", "warning")
    if made.differing:
        listed = _leaves(made.differing)
        output.say(f"{said}; {compared} made again, of which DIFFER: {listed}", "bad")
    elif made.same:
        output.success(f"{said}; {compared} made again, all the same ({format_bytes(made.nbytes)})")


def _levels(path: str) -> Sequence[SeenLevel]:
    """Return the tiers of a run that is verified as a whole."""
    store, final = store_of(path)
    return levels_of(store, final)[:-1] if store.kind(final) == "directory" else ()


async def _verify(path: str) -> VerifyReport:
    """Do what `penstock.verify` does, without the parts of a Checkpointer that need jax."""
    store, final = store_of(path)
    _, memory = config_and_regulator(None, {})
    return await Verification(store, Threads(), memory).verify(final)


def _document(found: VerifyReport) -> dict[str, Any]:
    document = asdict(found)
    findings = document.pop("findings")
    by_kind = {
        name: [finding for finding in findings if finding["kind"] == kind] for name, kind in _KINDS.items()
    }
    return {"status": found.status, "intact": found.intact, **document, **by_kind}


def _show(found: VerifyReport, output: Output) -> None:
    if found.status == "absent":
        problems = ", ".join(dict.fromkeys(finding.problem for finding in found.findings))
        output.say(f"{found.path}: {_SUMMARIES[found.status]} ({problems})", "warning")
        return
    if found.findings:
        plain = [_row(found.path, finding) for finding in found.findings]
        rows = [
            (leaves or file, _toned(kind), problem, file if leaves else "", *where)
            for kind, leaves, problem, file, *where in plain
        ]
        columns = ("leaf or document", "", "problem", "file", "offset", "bytes")
        output.table(Table(columns, rows, n_left=4, plain=plain, spare=("bytes", "offset", "file")))
    for path in found.leftovers:
        output.say(f"left by an interrupted save, and part of no checkpoint: {path}")

    n_checkpoints = len(found.checkpoints)
    checkpoints = f" in {n_checkpoints:,} checkpoints" if n_checkpoints > 1 else ""
    compared = f"{counted(found.n_ranges, 'range')}, {format_bytes(found.nbytes)}"
    documents, leaves = counted(found.n_documents, "document"), counted(found.n_leaves, "leaf", "leaves")
    what = f"{compared}, and {documents} of {leaves}{checkpoints}"
    summary = _SUMMARIES[found.status]
    if found.intact:
        output.success(f"{found.path}: {summary} ({what})")
    else:
        n_damaged = f", {len(found.damaged_leaves):,} of its leaves" if found.damaged_leaves else ""
        tone: Tone = "bad" if found.status in ("damaged", "unreadable") else "warning"
        output.say(f"{found.path}: {summary}{n_damaged} ({what} were checked)", tone)


def _toned(kind: str) -> str:
    return Toned(kind.upper() if kind == "damaged" else kind, _TONES[kind])


def _row(path: str, finding: Finding) -> Sequence[str]:
    file = (
        os.path.relpath(finding.file, path)
        if finding.file.startswith(os.path.join(path, ""))
        else finding.file
    )
    where = (f"{finding.offset:,}", f"{finding.nbytes:,}") if finding.nbytes else ("", "")
    return (finding.kind, _leaves(finding.key_paths), finding.problem, file, *where)


def _leaves(key_paths: Sequence[str]) -> str:
    shown = ", ".join(key_paths[:_MOST_LEAVES])
    more = len(key_paths) - _MOST_LEAVES
    return f"{shown} and {more:,} more" if more > 0 else shown
