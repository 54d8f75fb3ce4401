"""`penstock doctor`: says what this machine and a file system give to checkpoints."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
from importlib.util import find_spec
from typing import Final

from penstock.cli.looking.machine_facts import Fact, file_system_facts, machine_facts, settings
from penstock.cli.terminal.terminal_output import Output, Table

_EXTRAS: Final = {
    "rich": "cli",
    "obstore": "cloud",
    "watchfiles": "watch",
    "google.protobuf": "proto",
    "starlette": "ui",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Say what this machine and the file system of PATH give: direct I/O, huge pages, renames in one "
        "step, links, locks, limits, free space, versions. A small file is written below PATH and removed. "
        "Settings from the environment are listed, secrets masked. The exit status is 1 if something is "
        "missing that penstock needs. In a pipe: one line for each, with tabs between what, value, verdict "
        "and remark."
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default=".", help="where checkpoints would go (here)"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print what was found.

    Raises:
        OSError: If nothing can be written at the path.
    """
    facts = [*file_system_facts(options.path), *machine_facts(), *_packages(), *settings()]
    if options.json:
        output.say(json.dumps([fact._asdict() for fact in facts], indent=2))
    else:
        output.table(Table(("what", "value", "", ""), [tuple(fact) for fact in facts], n_left=4))

    return 1 if any(fact.verdict == "missing" for fact in facts) else 0


def _packages() -> list[Fact]:
    found: list[Fact] = []
    for module, extra in _EXTRAS.items():
        is_there = _is_there(module)
        remark = "" if is_there else f"pip install 'penstock[{extra}]'"
        found.append(
            Fact(
                module, "installed" if is_there else "not installed", "ok" if is_there else "optional", remark
            )
        )

    return found


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it lies in
        return False
