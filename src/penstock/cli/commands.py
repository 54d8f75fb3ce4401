"""The commands: their names, what each does in a line, and the module that it lies in.

A module has two functions: `configure` describes its command line, and `run` carries it out. It is imported
only when its command is called, or its options are to be completed.
"""

from __future__ import annotations

__all__ = ("COMMANDS", "Command", "CommandModule")

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Final, NamedTuple, Protocol, cast, final

from penstock.cli.terminal.terminal_output import Output


class CommandModule(Protocol):
    """The module of a command."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Describe the command's arguments."""
        ...

    def run(self, options: argparse.Namespace, output: Output) -> int:
        """Carry it out, and return the exit status."""
        ...


@final
class Command(NamedTuple):
    """One command."""

    module: str  #: below `penstock.cli`
    about: str

    def load(self) -> CommandModule:
        """Import its module."""
        return cast("CommandModule", import_module(f"penstock.cli.{self.module}"))


COMMANDS: Final[Mapping[str, Command]] = {
    "ls": Command("looking.ls_command", "list the steps of a run: sizes, age, metrics, state"),
    "show": Command(
        "looking.show_command", "show the tree of a checkpoint: shapes, dtypes, shardings, bytes"
    ),
    "du": Command("looking.du_command", "say which part of a checkpoint takes how much room"),
    "cat": Command("looking.cat_command", "read leaves: what their values add up to, or the values"),
    "diff": Command("looking.diff_command", "say how two checkpoints differ, in structure and values"),
    "watch": Command("looking.watch_command", "print the steps of a run as they become durable"),
    "ui": Command("looking.ui_command", "show a run as a page in the browser"),
    "doctor": Command("looking.doctor_command", "say what this machine and a file system give"),
    "cp": Command("changing.cp_command", "copy checkpoints as they are"),
    "gc": Command("changing.gc_command", "remove what interrupted saves and deletions left"),
    "convert": Command("changing.convert_command", "write a checkpoint in another format"),
    "rm": Command("changing.rm_command", "delete checkpoints"),
    "repair": Command("changing.repair_command", "write what is intact of a damaged checkpoint anew"),
    "seal": Command("changing.seal_command", "record digests of a checkpoint that has none"),
    "config": Command("tuning.config_command", "show, check and explain the configuration"),
    "tune": Command("tuning.tune_command", "measure a store, and write a profile that is faster there"),
    "verify": Command("changing.verify_command", "compare a checkpoint with its checksums"),
    "completion": Command("completion_command", "print what makes a shell complete commands and options"),
}
"""In the order of the help."""
