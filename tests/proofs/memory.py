"""Saves and restores much under a small budget, and looks at what it took. `make memory`.

Each measurement has a process of its own. Just before the operation that process is forbidden to get more
memory than the budget and `--slack` beyond what it has (`RLIMIT_DATA`, which counts private writable
mappings, whether anything lies in them or not; `RLIMIT_AS` would count what XLA's threads reserve and never
use). Whatever takes more ends it: a mapping is refused, and that is a MemoryError or an abort. The peak of
its resident memory (`VmHWM`, set back before through `/proc/self/clear_refs`) is looked at, too. So

* a save takes no more than that beyond the tree itself, however large the tree and its largest leaf: of
  NumPy arrays, which are copied; of jax.Arrays, which are looked at; and of jax.Arrays that are copied in
  pieces, as from an accelerator,
* a restore takes no more than that beyond the restored arrays; of the last kind, leaves larger than the
  budget go in parts to what stands for device memory,
* many saves in a row leave the resident memory where it was.

To see that the limit bites, the same is done with no budget at all, and, of a save, with nothing written
before everything is staged: that has to fail.

Everything is printed as one line of JSON for each measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, final

import anyio
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import penstock
from penstock.handlers import ArrayHandler, default_handlers
from penstock.kernel import Actor, SaveRun, StagedBatch
from penstock.kernel.options import parse_bytes
from penstock.pipelines import save_pipeline

MIB: Final = 2**20
KINDS: Final = ("numpy", "jax", "jax-copied")
GROWTH_BYTES: Final = 8 * MIB
"""What may be left by many saves: caches of the allocator, not of each save."""
OUT_OF_MEMORY: Final = ("MemoryError", "RESOURCE_EXHAUSTED", "bad_alloc", "Cannot allocate memory")


def build(kind: str, nbytes: int) -> dict[str, Any]:
    """A tree of that many bytes: an eighth in one leaf, the rest in leaves of 1/64; and small ones."""
    sizes = {"very_large": nbytes // 8} | {f"leaf_{at:02}": nbytes // 64 for at in range(56)}
    make = np.full if kind == "numpy" else jnp.full
    tree: dict[str, Any] = {
        name: make(size // 4, float(at), np.float32) for at, (name, size) in enumerate(sizes.items())
    }
    tree |= {f"small_{at:03}": make(256, float(at), np.float32) for at in range(500)}
    cast("Any", jax).block_until_ready(tree)
    return tree


@final
@dataclass(frozen=True, slots=True)
class Hoard:
    """A stage that passes on nothing before it has all of it, as a medium does that is slow enough."""

    concurrency: int = 1

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        yield _Hoarder([])


@dataclass(frozen=True, slots=True)
class _Hoarder:
    held: list[StagedBatch]

    async def __call__(self, batch: StagedBatch, /) -> None:
        self.held.append(batch)

    async def finish(self) -> AsyncIterator[StagedBatch]:
        for batch in self.held:
            yield batch


def checkpointer(kind: str, budget: int, *, hoards: bool = False) -> penstock.Checkpointer:
    """Whose handler for jax.Arrays copies, if that is wanted."""
    registry = default_handlers(entry_points=False)
    if kind == "jax-copied":
        handler = ArrayHandler(alias_host=False)
        types: tuple[type, ...] = (jax.Array, jax.ShapeDtypeStruct, Tracer)
        for type_ in types:
            registry.register(type_, handler, override=True)

    pipeline = save_pipeline()
    if hoards:
        pipeline = pipeline.insert_after("device_to_host", Hoard())

    return penstock.Checkpointer(memory_limit=budget, registry=registry, save_pipeline=pipeline)


def resident(field: str = "VmRSS") -> int:
    """Resident bytes of this process, now or (`VmHWM`) at most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024

    raise KeyError(field)


def forget_peak() -> None:
    """Begin to measure."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def allow(nbytes: int) -> None:
    """Have the system refuse this process whatever exceeds what it has now by more than that."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (resident("VmData") + nbytes, most))


async def save_once(kind: str, path: Path, nbytes: int, budget: int, allowed: int) -> dict[str, int]:
    """What one save takes beyond the tree."""
    tree = build(kind, nbytes)
    async with checkpointer(kind, budget, hoards=budget > nbytes) as ckpt:
        await warm_up(ckpt, kind, path)
        forget_peak()
        before = resident()
        allow(allowed)
        await (await ckpt.save(path, tree))
        return {"extra_bytes": resident("VmHWM") - before, "peak_leased_bytes": ckpt.statistics().peak}


async def restore_once(kind: str, path: Path, nbytes: int, budget: int, allowed: int) -> dict[str, int]:
    """What one restore takes beyond the restored arrays."""
    like = jax.tree_util.tree_map(lambda _: np.ndarray if kind == "numpy" else jax.Array, names())
    async with checkpointer(kind, budget) as ckpt:
        await warm_up(ckpt, kind, path)
        forget_peak()
        before = resident()
        allow(nbytes + allowed)
        tree = await ckpt.restore(path, like=like)
        extra = resident("VmHWM") - before - sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(tree))
        return {"extra_bytes": extra, "peak_leased_bytes": ckpt.statistics().peak}


async def save_often(
    kind: str, path: Path, nbytes: int, budget: int, allowed: int, n_saves: int
) -> dict[str, int]:
    """By how much the resident memory grows from the fifth save to the last.

    Of what is copied by jax, from the twentieth: until then the pools of the threads fill, which take turns.
    """
    settled = 19 if kind == "jax-copied" else 4
    tree = build(kind, nbytes)
    early = 0
    async with checkpointer(kind, budget) as ckpt:
        for number in range(n_saves):
            await (await ckpt.save(path, tree, overwrite=True))
            gc.collect()
            if number == settled:
                early = resident()
                allow(allowed + GROWTH_BYTES)

    return {"growth_bytes": resident() - early, "n_saves": n_saves}


async def warm_up(ckpt: penstock.Checkpointer, kind: str, path: Path) -> None:
    """Have modules imported and threads started, which are no part of an operation."""
    other = path.with_name("warm-up")
    await (await ckpt.save(other, build(kind, 4 * MIB)))
    await ckpt.restore(other)
    shutil.rmtree(other)


def names() -> dict[str, int]:
    """The structure of `build`, without its arrays."""
    return dict.fromkeys(
        ["very_large", *(f"leaf_{at:02}" for at in range(56)), *(f"small_{at:03}" for at in range(500))], 0
    )


def in_child(
    arguments: argparse.Namespace, what: str, kind: str, path: Path, budget: int
) -> subprocess.CompletedProcess[str]:
    """Measure in a process of its own, which may have what `--budget` and `--slack` say."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("tree", "slack", "saves")]
    options += [f"--budget={budget}", f"--allowed={allowed_bytes(arguments)}"]
    command = [sys.executable, __file__, *options, "--child", what, kind, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def allowed_bytes(arguments: argparse.Namespace) -> int:
    return parse_bytes(arguments.budget) + parse_bytes(arguments.slack)


def measure(arguments: argparse.Namespace, what: str, kind: str, path: Path) -> list[str]:
    """Measure one operation; return what is not as it must be."""
    most = allowed_bytes(arguments)
    done = in_child(arguments, what, kind, path, parse_bytes(arguments.budget))
    if done.returncode:
        return [f"{what} of {kind} failed under a limit of {most / MIB:.0f} MiB:\n{done.stderr}"]

    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    say({"what": what, "kind": kind, **found})
    if found.get("extra_bytes", 0) > most:
        return [f"{what} of {kind} took {found['extra_bytes'] / MIB:.0f} MiB, more than {most / MIB:.0f}"]
    if found.get("growth_bytes", 0) > GROWTH_BYTES:
        return [f"{arguments.saves} saves of {kind} left {found['growth_bytes'] / MIB:.0f} MiB behind"]

    return []


def measure_unlimited(arguments: argparse.Namespace, what: str, kind: str, path: Path) -> list[str]:
    """Do the same with a budget that holds everything; return what is wrong if it does not die of that."""
    done = in_child(arguments, what, kind, path, 16 * parse_bytes(arguments.tree))
    last = (done.stderr.strip().splitlines() or [""])[-1]
    say({"what": f"{what} without a budget", "kind": kind, "exit_status": done.returncode, "why": last})
    if not done.returncode:
        return [f"{what} of {kind} without a budget was not stopped: the limit proves nothing"]
    if done.returncode > 0 and not any(word in done.stderr for word in OUT_OF_MEMORY):
        return [f"{what} of {kind} without a budget failed of something else:\n{done.stderr}"]

    return []


def say(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def measure_all(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Measure everything; return what is not as it must be."""
    wrong: list[str] = []
    for kind in arguments.kinds:
        path = folder / kind
        wrong += measure(arguments, "save", kind, path)
        wrong += measure(arguments, "restore", kind, path)
        if kind == "jax-copied":
            wrong += measure_unlimited(arguments, "restore", kind, path)

        shutil.rmtree(path, ignore_errors=True)
        if arguments.saves:
            wrong += measure(arguments, "often", kind, path)

        shutil.rmtree(path, ignore_errors=True)
        if kind != "jax":  # of those nothing is copied
            wrong += measure_unlimited(arguments, "save", kind, path)

    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tree", default="2GiB")
    parser.add_argument("--budget", default="64MiB")
    parser.add_argument("--slack", default="48MiB")
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--allowed", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "KIND", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.child:
        with tempfile.TemporaryDirectory() as folder:
            wrong = measure_all(arguments, Path(folder))

        raise SystemExit("\n".join(wrong) or 0)

    what, kind, path = arguments.child
    nbytes, budget, allowed = map(parse_bytes, (arguments.tree, arguments.budget, arguments.allowed))
    if what == "often":
        say(anyio.run(save_often, kind, Path(path), nbytes // 8, budget, allowed, arguments.saves))
    else:
        once = save_once if what == "save" else restore_once
        say(anyio.run(once, kind, Path(path), nbytes, budget, allowed))


if __name__ == "__main__":
    main()
