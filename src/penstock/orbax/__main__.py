"""Run a program with penstock in the place of Orbax: `python -m penstock.orbax script.py ...`."""

from __future__ import annotations

__all__ = ("main",)

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.orbax.installation import install

_USAGE = "usage: python -m penstock.orbax (script.py | -m module) [argument ...]"


def main(arguments: Sequence[str]) -> None:
    """Run a script, or with `-m` a module, as the interpreter would, its imports of Orbax replaced.

    Args:
        arguments: The script and its arguments.

    Raises:
        SystemExit: If there is no script, and what the program itself raises.
    """
    as_module, given = (True, arguments[1:]) if arguments[:1] == ["-m"] else (False, arguments)
    if not given or given[0].startswith("-"):
        raise SystemExit(_USAGE)

    install()
    sys.argv = list(given)
    if as_module:
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
        return

    sys.path[0] = str(Path(given[0]).resolve().parent)  # where a script finds its neighbours
    runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
