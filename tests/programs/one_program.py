"""Run one part of one program with one library, in a process of its own, and write the facts as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Run it. The exit status says nothing: what failed is a fact."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module", help="tests.programs.drivers.NAME")
    parser.add_argument("part", choices=("save", "restore"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--library", choices=("orbax", "penstock"), required=True)
    parser.add_argument("--path", action="append", default=[], help="where the program is imported from")
    options = parser.parse_args()
    # Only now: many a program has a package `tests`, too.
    sys.path[:0] = options.path
    if options.library == "penstock":
        import penstock.orbax

        penstock.orbax.install()

    from tests.programs.facts import describe, files_of

    found: dict[str, Any] = {}
    try:
        module = import_module(options.module)
        found = {
            name: describe(value) for name, value in getattr(module, options.part)(options.directory).items()
        }
        if options.part == "save":
            found["files"] = files_of(options.directory)
    except Exception as error:
        traceback.print_exc()
        found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]

    options.facts.write_text(json.dumps(found, sort_keys=True))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a program may leave checkpointers open


if __name__ == "__main__":
    main()
