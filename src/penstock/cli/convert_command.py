"""`penstock convert`: writes a checkpoint in another format."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import anyio

import penstock
from penstock.checkpointer.engine import processes_of_jax
from penstock.cli.completers import completed, item_names
from penstock.cli.storage_options import add_storage_options, chosen_format, said_format
from penstock.cli.terminal import CommandError, NoBar, Output, Table, format_bytes
from penstock.handlers.formats.npz_archive import SUFFIX as NPZ_SUFFIX
from penstock.handlers.formats.safetensors.tensor_paths import SUFFIX
from penstock.kernel.memory.memory_limit import MOST_EXPANSION
from penstock.kernel.options import parse_bytes
from penstock.kernel.words import counted, in_short
from penstock.rules import RECIPES, Rules, load_recipe, load_rules, preview


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Write the checkpoint at SOURCE, in any format that penstock reads, to DESTINATION, with all of "
        "its items; of a directory of steps, every step. It is not loaded as a whole, and a checkpoint "
        "appears in one step, when it is complete."
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a checkpoint, a directory of steps, a safetensors file or a folder of them, or an npz file",
    )
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        nargs="?",
        help="a file *.safetensors or *.npz, or a directory",
    )
    parser.add_argument(
        "--format", choices=("orbax", "safetensors", "huggingface", "npz"),
        help=(
            "what to write (what the end of DESTINATION says, .safetensors or .npz, else orbax); huggingface "
            "is a folder as transformers' save_pretrained writes it"
        ),
    )  # fmt: skip
    item = parser.add_argument("--item", metavar="NAME", help="convert only this item of SOURCE, as a tree")
    completed(item, item_names)
    names = parser.add_mutually_exclusive_group()
    names.add_argument(
        "--split", default=".", metavar="TEXT",
        help="what separates the keys in the names of a safetensors or npz SOURCE (%(default)s)",
    )  # fmt: skip
    names.add_argument("--flat", action="store_true", help="do not split them: one flat dict")
    parser.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW",
        help="another name for a leaf, or for all below a name; without NEW it is left out; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", action="append", default=[], metavar="[PATTERN=]DTYPE",
        help="cast arrays, as in bfloat16 for all of its kind, or 'params.*=bfloat16'; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--rules", metavar="FILE",
        help="a file of rules: what becomes of each leaf, as docs/howto/change-checkpoints.md tells",
    )  # fmt: skip
    parser.add_argument(
        "--recipe", metavar="NAME", choices=sorted(RECIPES),
        help=f"rules that come with penstock, from transformers' models to jax: {', '.join(sorted(RECIPES))}",
    )  # fmt: skip
    parser.add_argument(
        "--inverse", action="store_true", help="undo the rules: from what they made to what it was"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print what the rules would make, without a DESTINATION",
    )
    parser.add_argument(
        "--max-shard-bytes", "--max-shard-size", metavar="SIZE",
        help="in a folder of safetensors, begin another file beyond this size, as in 5GB",
    )  # fmt: skip
    parser.add_argument(
        "--metadata", action="append", default=[], metavar="KEY=TEXT", help="to add; repeatable"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is at DESTINATION, in one step"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the same conversion, if it was interrupted"
    )
    parser.add_argument(
        "--distributed", nargs="?", const="", metavar="HOST:PORT,INDEX,COUNT",
        help=(
            "divide the work with the other processes of this job, each of which runs the command: those "
            "that jax.distributed finds (of Slurm, Open MPI, Kubernetes, TPU pods), or COUNT that meet at "
            "HOST:PORT, where number 0 runs"
        ),
    )  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE", help="host memory to use at most, as in 512MiB")
    add_storage_options(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Convert as the command line says, and print one line about what was written.

    Raises:
        CommandError: If an option is invalid.
        PenstockError: What `penstock.convert` raises.
    """
    rules = _rules(options)
    if options.dry_run:
        return _show_plan(options, rules, output)
    if options.destination is None:
        raise CommandError("DESTINATION is needed, unless --dry-run is given")

    index, count = (0, 1) if options.distributed is None else _join(options.distributed)
    call = partial(
        penstock.convert,
        options.source,
        options.destination,
        format=options.format,
        item=options.item,
        split=None if options.flat else options.split,
        max_shard_bytes=_size("--max-shard-bytes", options.max_shard_bytes),
        rules=rules,
        rename=dict(_rename(text) for text in options.rename) or None,
        dtype=_dtypes(options.dtype),
        overwrite=options.overwrite,
        resume=options.resume,
        custom_metadata=dict(_pair(text) for text in options.metadata),
        memory_limit=options.memory,
        save_format=chosen_format(options),
        max_expansion=options.max_expansion or MOST_EXPANSION,
    )
    with output.bar(None, "bytes") as bar:

        def show(done: int, total: int) -> None:
            bar.show(done, total=total)

        report = anyio.run(partial(call, progress=not isinstance(bar, NoBar) and show))

    seconds = f"{report.durable_s:.1f} s"
    ends = [name for name, end in (("npz", NPZ_SUFFIX), ("safetensors", SUFFIX)) if report.path.endswith(end)]
    written = options.format or next(iter(ends), "orbax")
    stored = said_format(options) if written == "orbax" else written
    if options.json:
        document = {"path": report.path, "n_leaves": report.n_leaves, "nbytes": report.nbytes}
        document |= {"process": index, "processes": count} if count > 1 else {}
        output.say(json.dumps({**document, "seconds": report.durable_s, "format": stored}, indent=2))
        return 0

    nbytes = format_bytes(report.nbytes)
    leaves = counted(report.n_leaves, "leaf", "leaves")
    part = f" by process {index} of {count}" if count > 1 else ""
    kept = f" and {format_bytes(report.nbytes_kept)} that were there" if report.nbytes_kept else ""
    output.success(f"{report.path}: {leaves}, {nbytes}{part}{kept}, in {seconds} ({stored})")
    return 0


_LEAVES_S: Final = 10
"""For the other processes at the end, or if one of them is gone: jax waits for five minutes."""


def _join(text: str) -> tuple[int, int]:
    """Join the other processes; return which one this is, and how many there are.

    Raises:
        CommandError: If that is not said, or they are not found.
    """
    import jax

    address, *numbers = text.split(",")
    if text and (len(numbers) != 2 or not all(number.isdigit() for number in numbers)):
        problem = "not of the form HOST:PORT,INDEX,COUNT, as in 10.0.0.1:1234,0,2"
        raise CommandError(f"--distributed {text}: {problem}")

    index, count = map(int, numbers) if text else (None, None)
    try:
        jax.distributed.initialize(address or None, count, index, shutdown_timeout_seconds=_LEAVES_S)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CommandError(f"--distributed: the other processes are not found: {error}") from error

    return processes_of_jax()


def _rules(options: argparse.Namespace) -> Rules | None:
    if options.rules is not None and options.recipe is not None:
        raise CommandError("--recipe and --rules are both rules: give one of them")

    if options.recipe is not None:
        rules = load_recipe(options.recipe)
    elif options.rules is not None:
        rules = load_rules(options.rules)
    else:
        given = "--inverse" if options.inverse else "--dry-run" if options.dry_run else ""
        if given:
            raise CommandError(f"{given} is about rules: give them by --rules FILE or --recipe NAME")
        return None

    return rules.inverse() if options.inverse else rules


def _show_plan(options: argparse.Namespace, rules: Rules | None, output: Output) -> int:
    assert rules is not None, "a dry run is about rules"
    split = None if options.flat else options.split
    leaves = anyio.run(partial(preview, options.source, rules, item=options.item, split=split))
    numbers = {id(rule): number for number, rule in enumerate(rules, 1)}
    if options.json:
        rows = [
            {
                "name": leaf.name,
                "shape": leaf.shape,
                "dtype": leaf.dtype,
                "nbytes": leaf.nbytes,
                "sources": leaf.sources,
                "rules": [numbers[id(rule)] for rule in leaf.rules],
                "read_bytes": leaf.read_bytes,
                "streams": leaf.streams,
            }
            for leaf in leaves
        ]
        output.say(json.dumps({"leaves": rows, "rules": [rule.table() for rule in rules]}, indent=2))
        return 0

    cells = [
        (
            leaf.name,
            leaf.dtype if leaf.shape is None else f"{leaf.dtype}{list(leaf.shape)}",
            in_short(leaf.sources),
            ", ".join(f"{numbers[id(rule)]} {rule.operation}" for rule in leaf.rules),
            format_bytes(leaf.read_bytes),
            "streams" if leaf.streams else "gathers",
        )
        for leaf in leaves
    ]
    output.table(Table(("result", "", "of", "rules", "reads", "how"), cells, n_left=4))
    total = sum(leaf.read_bytes for leaf in leaves)
    output.note(f"{counted(len(leaves), 'leaf', 'leaves')}, {format_bytes(total)} to read")
    return 0


def _size(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"{name}: {error}") from error


def _rename(text: str) -> tuple[str, str | None]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise CommandError(f"--rename {text}: not of the form OLD=NEW, nor OLD= to leave it out")

    return old, new or None


def _dtypes(given: Sequence[str]) -> str | Mapping[str, str] | None:
    pairs = [text.rpartition("=") for text in given]
    plain = [dtype for _, equals, dtype in pairs if not equals]
    if plain and len(given) > 1:
        raise CommandError(f"--dtype {plain[0]}: is for all arrays; give no other, or patterns alone")
    if plain:
        return plain[0]

    return {pattern: dtype for pattern, _, dtype in pairs} or None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CommandError(f"--metadata {text}: not of the form KEY=TEXT")

    return name, value
