"""`penstock ls`: lists the steps of a run."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.cli.completers import completed, metric_names
from penstock.cli.terminal import Output, Table, Tone, Toned, format_bytes
from penstock.handlers.layouts.discovery import find_place
from penstock.inspection.step_listing import (
    State,
    StepFacts,
    list_checkpoints,
    list_run,
    name_best,
    names_of_metrics,
)
from penstock.inspection.texts import age, iso_time, metric_text
from penstock.kernel.words import counted
from penstock.steps.tier_record import SeenLevel, levels_of, root_of_tier
from penstock.stores.store_finder import store_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "List the steps in PATH, also those that are being saved, were interrupted, or are damaged; in a "
        "folder of runs, every checkpoint below it. `own` are bytes that no other step shares. Where the run "
        "has tiers, `where` are those that have the step. In a pipe: one line for each, with tabs between "
        "name, state, bytes, own bytes, time, whether best or pinned, metrics as JSON, path, and where."
    )
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="a directory of steps (here)")
    best = parser.add_argument("--best", metavar="METRIC", help="mark the step where this metric is least")
    completed(best, metric_names)
    parser.add_argument("--max", action="store_true", help="with --best: where it is greatest")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the list.

    Raises:
        PenstockError: If nothing is there.
    """
    store, path = store_of(options.path)
    place = find_place(store, path)
    levels = levels_of(store, path) if place.kind in {"root", "folder"} else ()
    has_tiers = len(levels) > 1
    listed: Sequence[StepFacts] = (
        list_run(store, place, levels) if has_tiers else list_checkpoints(store, place)
    )
    if options.best is not None:
        listed = name_best(listed, options.best, "max" if options.max else "min")
    if options.json:
        kind = "root" if has_tiers else place.kind
        tiers = [_level(level) for level in levels[:-1]]
        steps = [_document(step) for step in listed]
        output.say(json.dumps({"path": path, "kind": kind, "tiers": tiers, "steps": steps}))
        return 0

    output.table(_table(listed, options.best, has_tiers=has_tiers))
    for step in listed:
        if step.problem:
            output.note(f"{step.name}: {step.problem}", "bad")

    if not has_tiers and place.kind == "root" and (root := root_of_tier(store, path)) is not None:
        output.note(f"a tier of {root}")
    for level in levels if has_tiers else ():
        seen = counted(len(level.steps), "step") if level.store is not None else level.problem
        output.note(f"{level.label} {level.path}: {seen}", "faint" if level.store is not None else "warning")

    total = format_bytes(sum(step.sizes.own_bytes for step in listed))
    whose = "its" if len(listed) == 1 else "their"
    output.note(f"\n{counted(len(listed), 'checkpoint')}, {total} of {whose} own")
    return 0


def _table(listed: Sequence[StepFacts], best: str | None, *, has_tiers: bool) -> Table:
    found = {name for step in listed for name in names_of_metrics(step.metrics)}
    names = sorted(found, key=lambda name: (name.count("/"), name))
    if best in names:
        names = [best, *[name for name in names if name != best]]

    where = ("where",) if has_tiers else ()
    columns = ("step", "state", "", *where, "size", "own", "age", *names)
    rows = [
        (
            step.name,
            _state(step),
            Toned(_marks(step), "good"),
            *([" ".join(step.where)] if has_tiers else []),
            format_bytes(step.sizes.nbytes),
            format_bytes(step.sizes.own_bytes),
            age(step.committed_at_ns),
            *[metric_text(step.metrics, name) for name in names],
        )
        for step in listed
    ]
    plain = [
        (
            step.name,
            step.state,
            str(step.sizes.nbytes),
            str(step.sizes.own_bytes),
            iso_time(step.committed_at_ns),
            _marks(step),
            json.dumps(dict(step.metrics)),
            step.path,
            " ".join(step.where),
        )
        for step in listed
    ]
    # Of metrics the last names go first: the best one is that of the first.
    spare = [*names[:0:-1], *names[:1], "age"]
    is_shared = any(step.sizes.shared_bytes for step in listed)
    spare.insert(len(names) - 1 if is_shared and names else 0, "own")
    return Table(columns, rows, n_left=3 + has_tiers, plain=plain, spare=spare)


_TONES: Final[Mapping[State, Tone]] = {
    "saving": "busy",
    "interrupted": "warning",
    "damaged": "bad",
    "unknown": "warning",
}


def _state(step: StepFacts) -> str:
    if step.state == "finished":
        return step.state

    # What is lost is seen without colours, too.
    return Toned(step.state.upper() if step.state == "damaged" else step.state, _TONES[step.state])


def _marks(step: StepFacts) -> str:
    return " ".join([mark for mark, is_so in (("best", step.is_best), ("pinned", step.is_pinned)) if is_so])


def _level(level: SeenLevel) -> dict[str, Any]:
    return {
        "label": level.label,
        "path": level.path,
        "steps": list(level.steps),
        "problem": level.problem or None,
    }


def _document(step: StepFacts) -> dict[str, Any]:
    return {
        "name": step.name,
        "step": step.step,
        "path": step.path,
        "state": step.state,
        "nbytes": step.sizes.nbytes,
        "own_bytes": step.sizes.own_bytes,
        "shared_bytes": step.sizes.shared_bytes,
        "n_files": step.sizes.n_files,
        "committed_at": iso_time(step.committed_at_ns) or None,
        "metrics": dict(step.metrics),
        "is_best": step.is_best,
        "is_pinned": step.is_pinned,
        "where": list(step.where),
        "problem": step.problem or None,
    }
