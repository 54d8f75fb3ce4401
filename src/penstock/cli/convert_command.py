"""`penstock convert`: writes a checkpoint in another format."""

from __future__ import annotations

__all__ = ("convert",)

import argparse
from functools import partial

import anyio

import penstock
from penstock.cli.terminal.byte_sizes import format_bytes
from penstock.cli.terminal.terminal_output import CommandError, Output
from penstock.kernel.config.units import parse_bytes


def convert(options: argparse.Namespace, output: Output) -> int:
    """Convert as the command line says, and print one line about what was written.

    Raises:
        CommandError: If an option is invalid.
        PenstockError: What `penstock.convert` raises.
    """
    run = partial(
        penstock.convert,
        options.source,
        options.destination,
        format=options.format,
        item=options.item,
        split=None if options.flat else options.split,
        max_shard_bytes=_size("--max-shard-bytes", options.max_shard_bytes),
        overwrite=options.overwrite,
        custom_metadata=dict(_pair(text) for text in options.metadata),
        memory_limit=options.memory,
    )
    report = anyio.run(run)
    seconds = f"{report.durable_s:.1f} s"
    output.success(f"{report.path}: {report.n_leaves:,} leaves, {format_bytes(report.nbytes)}, in {seconds}")
    return 0


def _size(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"{name}: {error}") from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CommandError(f"--metadata {text}: not of the form KEY=TEXT")

    return name, value
