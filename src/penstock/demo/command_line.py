"""The command line of the demo: `penstock demo`, and `make demo`."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
from pathlib import Path

from penstock.cli.terminal import Output, open_output
from penstock.demo.acts import DemoOptions, run_demo


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.description = (
        "Train a small transformer and save it while training goes on. Kill a second process in the "
        "middle of a save, resume in a third, and compare the losses bit for bit. Runs on the CPU unless "
        "JAX_PLATFORMS names another platform."
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="what to learn (the source of penstock's kernel)"
    )
    parser.add_argument("--steps", type=int, default=85, metavar="N", help="steps to train (%(default)s)")
    parser.add_argument(
        "--every", type=int, default=25, metavar="N", help="steps between saves (%(default)s)"
    )
    parser.add_argument(
        "--store", choices=("disk", "s3"), default="disk",
        help="where checkpoints go: a directory, or a bucket in SeaweedFS on loopback (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a smaller model, for a quick look")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="put the checkpoints there and leave them")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", default=Path("penstock-demo-timeline.svg"),
        help="where the timeline goes (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds-budget", type=float, default=40.0, metavar="S",
        help="train fewer steps if it would take much longer than this (%(default)s)",
    )  # fmt: skip


def run(options: argparse.Namespace, output: Output) -> int:
    """Run the demo and return its exit status; see `run_demo`."""
    chosen = DemoOptions(
        text=options.text,
        steps=options.steps,
        every=options.every,
        size="small" if options.small else "full",
        seconds=options.seconds_budget,
        keep=options.keep,
        picture=options.picture,
        store=options.store,
    )
    # Whatever reads it: this is only to be looked at.
    return run_demo(chosen, output if output.is_for_people else open_output(for_people=True))
