"""What many small leaves take in memory and in time, for each leaf. `make memory` runs it with a million.

Each operation has a process of its own. Its peak (`VmHWM`, set back before through `/proc/self/clear_refs`)
is compared with what it had before: beside the tree of a save, and with all of the value that a restore or a
look at the metadata returns. What stays once the value is dropped is told, too.

Everything is printed as one line of JSON for each operation; times are of a machine that may be busy.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np

import penstock

OPERATIONS: Final = ("save", "metadata", "restore")
MOST_BYTES: Final = {"save": 750, "metadata": 1250, "restore": 1600}
"""For each leaf, about a fifth above what was measured: so that a change for the worse is noticed."""


def resident(field: str = "VmRSS") -> int:
    """Resident bytes of this process, now or (`VmHWM`) at most since the peak was set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def build(n: int) -> dict[str, Any]:
    """Siblings of 64 bytes."""
    return {f"leaf_{at:07}": np.full(16, at, np.float32) for at in range(n)}


async def measure(operation: str, n: int, budget: str, path: Path) -> dict[str, float]:
    """Perform one operation and return what it took for each leaf."""
    tree = build(n) if operation == "save" else {}
    async with penstock.Checkpointer(memory_limit=budget) as checkpointer:
        await checkpointer.restore(path.with_name("warm"))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before, since = resident(), time.perf_counter()
        found: Any = None
        if operation == "save":
            await (await checkpointer.save(path, tree))
        else:
            act: Any = checkpointer.metadata if operation == "metadata" else checkpointer.restore
            found = await act(path)

        seconds, peak = time.perf_counter() - since, resident("VmHWM")
        del found
        gc.collect()
        left = resident()

    return {
        "peak_bytes": (peak - before) / n,
        "left_bytes": (left - before) / n,
        "microseconds": seconds / n * 1e6,
    }


async def warm_up(folder: Path) -> None:
    await penstock.save(folder / "warm", build(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--leaves", type=int, default=1_000_000)
    parser.add_argument("--budget", default="256MiB")
    parser.add_argument("--child", nargs=2, metavar=("OPERATION", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        operation, path = arguments.child
        found = anyio.run(measure, operation, arguments.leaves, arguments.budget, Path(path))
        sys.stdout.write(json.dumps({name: round(value, 1) for name, value in found.items()}) + "\n")
        return

    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(warm_up, Path(folder))
        for operation in OPERATIONS:
            options = [f"--leaves={arguments.leaves}", f"--budget={arguments.budget}"]
            command = [sys.executable, __file__, *options, "--child", operation, f"{folder}/checkpoint"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            figures: dict[str, float] = json.loads(done.stdout)
            sys.stdout.write(json.dumps({"what": operation, "n_leaves": arguments.leaves, **figures}) + "\n")
            sys.stdout.flush()
            peak_bytes, most_bytes = figures["peak_bytes"], MOST_BYTES[operation]
            if peak_bytes > most_bytes:
                wrong.append(f"{operation} took {peak_bytes} bytes a leaf, more than {most_bytes}")

    raise SystemExit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
