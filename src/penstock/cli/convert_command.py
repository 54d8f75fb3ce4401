"""`penstock convert`: writes a checkpoint in another format."""

from __future__ import annotations

__all__ = ("convert",)

import argparse
from functools import partial

import anyio

import penstock
from penstock.cli.storage_options import chosen_format, said_format
from penstock.cli.terminal.byte_sizes import format_bytes
from penstock.cli.terminal.terminal_output import CommandError, Output
from penstock.handlers.formats.safetensors.file_set import SUFFIX
from penstock.kernel.config.units import parse_bytes
from penstock.kernel.memory.memory_limit import MOST_EXPANSION


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
        save_format=chosen_format(options),
        max_expansion=options.max_expansion or MOST_EXPANSION,
    )
    report = anyio.run(run)
    seconds = f"{report.durable_s:.1f} s"
    to_tensors = options.format == "safetensors" or options.destination.endswith(SUFFIX)
    stored = "safetensors" if to_tensors else said_format(options)
    nbytes = format_bytes(report.nbytes)
    output.success(f"{report.path}: {report.n_leaves:,} leaves, {nbytes}, in {seconds} ({stored})")
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
