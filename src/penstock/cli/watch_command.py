"""`penstock watch`: prints the steps of a run as they become durable."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

import penstock
from penstock.cli.terminal import CommandError, Output, Table, format_bytes
from penstock.inspection.step_listing import StepFacts, describe_step_at
from penstock.inspection.texts import iso_time
from penstock.kernel.protocols.stores import Store
from penstock.steps.tier_record import levels_of
from penstock.stores.store_finder import store_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Print each step of the run at PATH as it becomes durable, beginning with the latest, until "
        "Ctrl-C. Where the run has tiers, those are named that have the step, too. In a pipe: one line for "
        "each, with tabs between number, bytes, time, metrics as JSON, path, and where it is."
    )
    parser.add_argument("path", metavar="PATH", help="a directory of steps, which need not exist yet")
    parser.add_argument("--after", type=int, metavar="N", help="begin with the first step after this one")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end if no step comes for so many seconds (never)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document a line")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print steps until it is interrupted, or the time is over.

    Raises:
        PenstockError: What `penstock.watch` raises.
    """
    anyio.run(partial(_watch, options, output))
    return 0


async def _watch(options: argparse.Namespace, output: Output) -> None:
    store, root = store_of(options.path)
    if await anyio.to_thread.run_sync(store.kind, root) == "file":
        raise CommandError(f"{root}: is a file, not a directory of steps")

    steps = penstock.watch(root, names=_AnyPrefix(), after=options.after, timeout_s=options.timeout)
    async for step in steps:
        found = await anyio.to_thread.run_sync(_described, store, root, step)
        if found is not None:  # else it was deleted just now
            _say(found, options, output)


def _described(store: Store, root: str, step: int) -> StepFacts | None:
    """Return the step, with the levels that have it if the run has tiers."""
    found = describe_step_at(store, root, step)
    levels = levels_of(store, root)
    if found is None or len(levels) == 1:
        return found

    return replace(found, where=tuple([level.label for level in levels if step in level.steps]))


def _say(found: StepFacts, options: argparse.Namespace, output: Output) -> None:

    metrics = json.dumps(dict(found.metrics))
    if options.json:
        document: dict[str, Any] = {"step": found.step, "path": found.path, "nbytes": found.sizes.nbytes}
        output.say(
            json.dumps(
                {
                    **document,
                    "committed_at": iso_time(found.committed_at_ns),
                    "metrics": found.metrics,
                    "where": list(found.where),
                }
            )
        )
        return

    where = " ".join(found.where)
    size, when = format_bytes(found.sizes.nbytes), iso_time(found.committed_at_ns)
    row = (str(found.step), size, when[11:19], *([where] if where else []), metrics)
    plain = (str(found.step), str(found.sizes.nbytes), when, metrics, found.path, where)
    output.table(Table((), [row], plain=[plain]))


class _AnyPrefix:
    """Finds steps whatever their prefix and padding are. It names none: nothing is saved."""

    def name(self, step: int, /) -> str:
        return str(step)

    def step(self, name: str, /) -> int | None:
        from penstock.inspection.step_listing import step_number_in

        return step_number_in(os.path.basename(name))
