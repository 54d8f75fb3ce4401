"""`penstock demo`: runs the demo of the source tree. The demo itself is not part of the package."""

from __future__ import annotations

__all__ = ("demo",)

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import penstock
from penstock.cli.terminal import CommandError


def demo(arguments: Sequence[str]) -> int:
    """Run the demo and return its exit status.

    Args:
        arguments: Those after `penstock demo`.

    Raises:
        CommandError: If penstock was not imported from its source tree, or the demo fails.
    """
    folder = Path(penstock.__file__).resolve().parents[2] / "docs" / "examples" / "demo"
    if not (folder / "penstock_demo").is_dir():
        raise CommandError(
            f"the demo is not in the installed package; get the source of penstock {penstock.__version__} "
            "and run `make demo` there"
        )

    sys.path.insert(0, str(folder))
    status: int = import_module("penstock_demo.command_line").main(arguments)
    return status
