"""Run the cells of one notebook of Orbax's documentation, and say of each how it ended.

Run by `tests.proofs.orbax_guides`, in a process of its own. With `--library penstock` the notebook stays as
it is, and penstock stands in the place of `orbax.checkpoint`.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

_MAGIC = re.compile(r"^\s*[!%].*$", re.MULTILINE)


def cells_of(notebook: Path, scratch: Path) -> list[str]:
    """Return the code of a notebook, without the shell's part, writing below a folder instead of /tmp."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    codes = ["".join(cell["source"]) for cell in cells]
    return [re.sub(r"(?<=['\"/])/tmp(?=/)", str(scratch), _MAGIC.sub("", code)) for code in codes]


def run(code: str, names: dict[str, Any], loop: asyncio.AbstractEventLoop) -> str:
    """Run a cell; return what it failed with, on one line, or nothing."""
    try:
        result = eval(compile(code, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(result):
            loop.run_until_complete(asyncio.ensure_future(result, loop=loop))
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]

    return ""


def main() -> None:
    """Run the notebook."""
    parser = argparse.ArgumentParser()
    parser.add_argument("notebook", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--library", choices=("orbax", "penstock"), default="penstock")
    options = parser.parse_args()
    codes = cells_of(options.notebook.absolute(), options.scratch)
    results = options.results.absolute()
    os.chdir(options.scratch)
    if options.library == "penstock":
        import penstock.orbax

        penstock.orbax.install()

    loop = asyncio.new_event_loop()
    names: dict[str, Any] = {"__name__": "__main__"}
    with results.open("w") as said:
        for number, code in enumerate(codes):
            why = run(code, names, loop)
            said.write(json.dumps({"cell": number, "why": why}) + "\n")
            said.flush()

    sys.stdout.flush()
    os._exit(0)  # a guide leaves checkpointers open


if __name__ == "__main__":
    main()
