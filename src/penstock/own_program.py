"""Tells the process of the `penstock` command from others. Pure."""

from __future__ import annotations

__all__ = ("runs_the_command",)

from collections.abc import Sequence

_MODULES = ("penstock", "penstock.cli", "penstock.keeper")


def runs_the_command(argv: Sequence[str], orig_argv: Sequence[str]) -> bool:
    """True if the interpreter was started as `penstock`, `python -m penstock` or as a keeper.

    Args:
        argv: `sys.argv`; while Python looks for the module of `-m`, its first word is `-m`.
        orig_argv: `sys.orig_argv`, the whole line.
    """
    program = argv[0] if argv else ""
    if program == "-m":
        at = orig_argv.index("-m") + 1 if "-m" in orig_argv else len(orig_argv)
        return any(name in _MODULES for name in orig_argv[at : at + 1])

    name = program.replace("\\", "/").rpartition("/")[2]
    return name in ("penstock", "penstock.exe", "penstock-script.py")
