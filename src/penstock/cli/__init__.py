"""The `penstock` command: one file for each subcommand, and one, `terminal`, for how all of them print.

The file of a command, such as `ls_command`, has two functions: `configure` describes its command line, and
`run` carries it out. It is imported only when the command is called, or its options are to be completed.
"""

from __future__ import annotations

__all__ = ("COMMANDS", "CommandModule", "load_command", "main")

import argparse
import gc
import os
import re
import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Final, NoReturn, Protocol, cast

import penstock
from penstock.cli.terminal import EXPECTED, Output, paged_output, say_error, say_usage
from penstock.kernel.words import hint_at, nearest


class CommandModule(Protocol):
    """The module of a command."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Describe the command's arguments."""
        ...

    def run(self, options: argparse.Namespace, output: Output) -> int:
        """Carry it out, and return the exit status."""
        ...


COMMANDS: Final[Mapping[str, str]] = {
    "ls": "list the steps of a run: sizes, age, metrics, state",
    "show": "show the tree of a checkpoint: shapes, dtypes, shardings, bytes",
    "du": "say which part of a checkpoint takes how much room",
    "cat": "read leaves: what their values add up to, or the values",
    "diff": "say how two checkpoints differ, in structure and values",
    "watch": "print the steps of a run as they become durable",
    "ui": "show a run as a page in the browser",
    "doctor": "say what this machine and a file system give",
    "cp": "copy checkpoints as they are",
    "gc": "remove what interrupted saves and deletions left",
    "convert": "write a checkpoint in another format",
    "rm": "delete checkpoints",
    "repair": "write what is intact of a damaged checkpoint anew",
    "seal": "record digests of a checkpoint that has none",
    "keeper": "hold checkpoints in memory: run, show and stop the process, or take a step from it",
    "config": "show, check and explain the configuration",
    "tune": "measure a store, and write a profile that is faster there",
    "verify": "compare a checkpoint with its checksums",
    "completion": "print what makes a shell complete commands and options",
    "demo": "watch saves at work, one of them killed half-way",
}
"""Each command in a line, in the order of the help."""

_PAGED: Final = frozenset({"ls", "show", "du", "cat", "diff", "config"})
"""What only prints, and may be longer than a terminal."""


def load_command(name: str) -> CommandModule:
    """Import the module of a command."""
    # The demo is a room above this one: it prints as commands do.
    module = "penstock.demo.command_line" if name == "demo" else f"penstock.cli.{name}_command"
    return cast("CommandModule", import_module(module))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a failure, 2 for wrong usage.

    `verify`, `repair` and `diff` have more; their help says which.

    Args:
        arguments: Without the program's name; by default those of the process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if "numpy" not in sys.modules:
            # No command multiplies matrices. For that NumPy would start a thread for each core as it is
            # imported, and they cost as much processor time as the rest of it.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

        if "_ARGCOMPLETE" in os.environ:
            _complete()

        with _without_collections():  # while modules are loaded
            named = _named(given)
            if not {*named} <= {*COMMANDS}:
                return say_usage(f"there is no command {named[0]!r}; {hint_at(named[0], list(COMMANDS))}")

            parser = _parser(named)

        if arguments is None:
            # What modules made stays until this process ends, which then need not look through it all.
            gc.freeze()

        options, unknown = parser.parse_known_args(given)
        if unknown:
            return say_usage(*_unknown(parser, options.command, unknown[0]))

        if options.command != "doctor":
            # Nothing that a command does needs an accelerator, and a training may hold the only one.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")

        with paged_output(for_people=options.table, paged=options.command in _PAGED) as output:
            return load_command(options.command).run(options, output)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`), which is not a failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130  # what a shell expects of a command ended by SIGINT
    except EXPECTED as error:
        say_error(error)
        return 1


@contextmanager
def _without_collections() -> Generator[None]:
    """Collect no garbage meanwhile: modules make objects that stay, and each collection takes longer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _named(given: Sequence[str]) -> Sequence[str]:
    """Return the command that is called, if there is one; a subcommand may have the name of another one."""
    return [word for word in given if not word.startswith("-")][:1]


class _Parser(argparse.ArgumentParser):
    """Says in two lines what is wrong with a command line, instead of all that would be right."""

    def error(self, message: str) -> NoReturn:
        sys.exit(say_usage(message, self.prog))


def _parser(configured: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser; of the commands, only those named in `configured` know their arguments.

    So a command does not wait for what the others import.
    """
    parser = _Parser(prog="penstock", description="Checkpoints for JAX, made for asyncio.")
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    parser.add_argument("--table", action="store_true", help="print tables in a pipe, too, as for a pager")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    named = [name for name in configured if name in COMMANDS]
    for name in named or COMMANDS:  # all of them only for the help: each takes half a millisecond
        added = commands.add_parser(name, help=COMMANDS[name])
        if name in configured:
            load_command(name).configure(added)

    return parser


def _unknown(parser: argparse.ArgumentParser, command: str, given: str) -> tuple[str, str]:
    """Return what is wrong with an argument that a command does not have, and the command."""
    if not given.startswith("-"):
        return f"{command} takes no argument {given!r}", f"{parser.prog} {command}"

    help_of_one = _Parser(add_help=True)
    load_command(command).configure(help_of_one)
    # Compared without the dashes, which are alike in all of them.
    known = sorted(set(re.findall(r"--([a-z][a-z-]+)", help_of_one.format_help())))
    near = nearest(given.partition("=")[0].lstrip("-"), known)
    hint = f"; did you mean --{near}?" if near else ""
    return f"{command} has no option {given}{hint}", f"{parser.prog} {command}"


def _complete() -> None:
    """Answer the shell, which asks how a line may go on, and end; see `penstock completion`."""
    import argcomplete

    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))]
    before = line.split()[1:] if line.endswith(" ") else line.split()[1:-1]
    argcomplete.autocomplete(_parser([name for name in _named(before) if name in COMMANDS]))
