"""The `penstock` command."""

from __future__ import annotations

__all__ = ("main",)

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import penstock
from penstock.cli.storage_options import add_storage_options
from penstock.cli.terminal.terminal_output import CommandError, open_output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a failure, 2 for wrong usage.

    `verify` and `repair` have more; their help says which.

    Args:
        arguments: Without the program's name; by default those of the process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given[:1] == ["demo"]:
            return _demo(given[1:])

        options = _parser().parse_args(given)
        return _COMMANDS[options.command](options)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`), which is not a failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130  # what a shell expects of a command ended by SIGINT
    except (CommandError, penstock.PenstockError, OSError) as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Checkpoints for JAX, made for asyncio.")
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="watch saves at work, one of them killed half-way")
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds")
    inspect.add_argument("path", metavar="PATH", help="the directory of a checkpoint")
    inspect.add_argument("--json", action="store_true", help="as one JSON document")
    delete = commands.add_parser("delete", help="delete one checkpoint")
    delete.description = "Delete the checkpoint at PATH, on a disk or in a bucket. Nothing else is deleted."
    delete.add_argument("path", metavar="PATH", help="a checkpoint, or one step")
    _add_convert(commands.add_parser("convert", help="write a checkpoint in another format"))
    _add_repair(commands.add_parser("repair", help="write what is intact of a damaged checkpoint anew"))
    seal = commands.add_parser("seal", help="record digests of a checkpoint that has none")
    seal.description = (
        "Record the digests of everything in the checkpoint at PATH, or in each step there, as it is now, so "
        "that `verify` and restores can compare it. For checkpoints that Orbax, or penstock 0.1, wrote."
    )
    seal.add_argument("path", metavar="PATH", help="a checkpoint, or a directory of steps")
    seal.add_argument("--json", action="store_true", help="as one JSON document")
    _add_verify(commands.add_parser("verify", help="compare a checkpoint with its checksums"))
    return parser


def _add_repair(repair: argparse.ArgumentParser) -> None:
    repair.description = (
        "Write every intact leaf of the damaged checkpoint at SOURCE into a new one at TARGET, and list what "
        "is gone. The exit status is 0 if nothing is, 1 if something is gone, and 4 if something was kept of "
        "which no checksum says that it is intact."
    )
    repair.add_argument("source", metavar="SOURCE", help="a checkpoint, or one step")
    repair.add_argument("target", metavar="TARGET", help="the directory, or .safetensors file, to write")
    repair.add_argument(
        "--other", action="append", default=[], metavar="STEP",
        help="another checkpoint, to take damaged leaves from where they are the same; repeatable",
    )  # fmt: skip
    repair.add_argument("--overwrite", action="store_true", help="replace what is at TARGET, in one step")
    repair.add_argument("--memory", metavar="SIZE", help="host memory to use at most, as in 512MiB")
    add_storage_options(repair)
    repair.add_argument("--json", action="store_true", help="as one JSON document")


def _add_verify(verify: argparse.ArgumentParser) -> None:
    verify.description = (
        "Compare everything at and below PATH with the checksums recorded of it: every step, every item, "
        "every file. The exit status is 0 if all of it is intact, 1 if something is damaged, 3 if there is "
        "no checkpoint, 4 if something has no checksum, and 5 if the medium refused to read something."
    )
    verify.add_argument(
        "path", metavar="PATH", help="a checkpoint, a directory of steps, or a folder of these"
    )
    verify.add_argument("--json", action="store_true", help="as one JSON document")


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.description = (
        "Write the checkpoint at SOURCE, in any format that penstock reads, to DESTINATION, with all of its "
        "items; of a directory of steps, every step. It is not loaded as a whole, and a checkpoint appears "
        "in one step, when it is complete."
    )
    convert.add_argument(
        "source",
        metavar="SOURCE",
        help="a checkpoint, a directory of steps, a safetensors file, or a folder of them",
    )
    convert.add_argument("destination", metavar="DESTINATION", help="a file *.safetensors, or a directory")
    convert.add_argument(
        "--format", choices=("orbax", "safetensors"),
        help="what to write (safetensors if DESTINATION ends in .safetensors, else orbax)",
    )  # fmt: skip
    convert.add_argument("--item", metavar="NAME", help="convert only this item of SOURCE, as a tree")
    names = convert.add_mutually_exclusive_group()
    names.add_argument(
        "--split", default=".", metavar="TEXT",
        help="what separates the keys in the names of a safetensors SOURCE (%(default)s)",
    )  # fmt: skip
    names.add_argument("--flat", action="store_true", help="do not split them: one flat dict")
    convert.add_argument(
        "--max-shard-bytes", metavar="SIZE",
        help="in a safetensors folder, begin another file beyond this size, as in 5GB",
    )  # fmt: skip
    convert.add_argument(
        "--metadata", action="append", default=[], metavar="KEY=TEXT", help="to add; repeatable"
    )
    convert.add_argument(
        "--overwrite", action="store_true", help="replace what is at DESTINATION, in one step"
    )
    convert.add_argument("--memory", metavar="SIZE", help="host memory to use at most, as in 512MiB")
    add_storage_options(convert)


def _demo(arguments: Sequence[str]) -> int:
    from penstock.cli.demo_command import demo

    return demo(arguments)  # which has a command line of its own


def _inspect(options: argparse.Namespace) -> int:
    from penstock.cli.inspect_command import inspect

    return inspect(options.path, open_output(), as_json=options.json)


def _convert(options: argparse.Namespace) -> int:
    from penstock.cli.convert_command import convert

    return convert(options, open_output())


def _delete(options: argparse.Namespace) -> int:
    from penstock.cli.delete_command import delete

    return delete(options.path, open_output())


def _repair(options: argparse.Namespace) -> int:
    from penstock.cli.repair_command import repair

    return repair(options, open_output())


def _seal(options: argparse.Namespace) -> int:
    from penstock.cli.seal_command import seal

    return seal(options.path, open_output(), as_json=options.json)


def _verify(options: argparse.Namespace) -> int:
    from penstock.cli.verify_command import verify

    return verify(options.path, open_output(), as_json=options.json)


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "convert": _convert,
    "delete": _delete,
    "inspect": _inspect,
    "repair": _repair,
    "seal": _seal,
    "verify": _verify,
}
