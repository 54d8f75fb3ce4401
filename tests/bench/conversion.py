"""What a conversion by rules costs: memory, and time beside `cp` and beside a script that loads everything.

`python -m tests.bench.conversion` measures a source of 2 GiB. `--whole` converts 24 GiB, one leaf of them of
8 GiB, under a budget of 256 MiB. `--shared` lets one process and then two convert into a store that takes
so many bytes a second of each. `--only` measures one rule, and `--leaf` says how large that one leaf is.
Each conversion is a process of its own; the sources are made up on the way, and all files are deleted in the
end. Every way syncs what it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, Final, cast

import numpy as np

from penstock.handlers import LocalStore
from penstock.kernel import DataFile, StoreWrapper

MIB: Final = 2**20
GIB: Final = 2**30
BUDGET: Final = 256 * MIB
MOST_EXTRA: Final = 300 * MIB
"""Bytes that a conversion may take over those of an interpreter with jax and penstock."""

COLUMNS: Final = 4096
RULES: Final[Mapping[str, str]] = {
    "rename": '[[rule]]\nrename = "layers.{i}.w"\nto = "blocks.{i}.kernel"\n',
    "cast": '[[rule]]\ncast = "**"\ndtype = "bfloat16"\n',
    "split": '[[rule]]\nsplit = "layers.{i}.w"\nto = ["layers.{i}.q", "layers.{i}.k"]\naxis = 0\n',
    "stack": '[[rule]]\nstack = "layers.{i:int}.w"\nto = "layers.w"\n',
    "transpose": '[[rule]]\ntranspose = "layers.{i}.w"\n',
}
WANTED: Final[Mapping[str, float]] = {**dict.fromkeys(RULES, 0.8), "transpose": 0.4}
"""The least speed, as a part of that of `cp`."""

MOST_SHARED: Final = 0.6
"""The most time that two processes may take, as a part of that of one."""


def make_up(path: Path, leaves: Mapping[str, int]) -> None:
    """Write a safetensors file of float32 leaves of so many bytes, in rows of `COLUMNS`."""
    header: dict[str, Any] = {}
    end = 0
    for name, nbytes in leaves.items():
        shape = [nbytes // 4 // COLUMNS, COLUMNS]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes

    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    noise = np.random.default_rng(0).standard_normal(4 * MIB, np.float32).data.cast("B")
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(described)) + described)
        for number, at in enumerate(range(0, end, len(noise))):
            cut = len(noise) - 4 * number % len(noise)  # elements are others in each row of the leaves
            left = end - at
            file.write(noise[cut:][:left])
            file.write(noise[:cut][: max(0, left - len(noise) + cut)])

        os.fsync(file.fileno())


def copy(source: Path, target: Path) -> None:
    """What `cp` does, and a sync."""
    subprocess.run(["cp", source, target], check=True)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def script_of(rule: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what a script does with all leaves in memory."""
    import ml_dtypes

    return {
        "rename": lambda leaves: {
            name.replace("layers", "blocks").replace(".w", ".kernel"): leaf for name, leaf in leaves.items()
        },
        "cast": lambda leaves: {name: leaf.astype(ml_dtypes.bfloat16) for name, leaf in leaves.items()},
        "split": lambda leaves: {
            name.replace(".w", end): half
            for name, leaf in leaves.items()
            for end, half in zip((".q", ".k"), np.split(leaf, 2), strict=True)
        },
        "stack": lambda leaves: {
            "layers.w": np.stack([leaves[f"layers.{at}.w"] for at in range(len(leaves))])
        },
        "transpose": lambda leaves: {name: np.ascontiguousarray(leaf.T) for name, leaf in leaves.items()},
    }[rule]


def run_script(source: Path, target: Path, rule: str) -> None:
    """Load all, change it, write it and sync."""
    from safetensors.numpy import load_file, save_file

    save_file(script_of(rule)(load_file(source)), target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def run_here(way: str, source: Path, target: Path, rule: str) -> None:
    """Convert in this process, and print seconds, and bytes over those before.

    What a process pays once, however much it converts, such as loading modules, is measured apart, by a
    conversion of a tiny file.
    """
    import jax

    import penstock

    def convert(source: Path) -> None:
        if way == "script":
            run_script(source, target, rule)
            return

        file = source.with_suffix(f".{rule}.toml")
        file.write_text(RULES[rule])
        penstock.sync.convert(
            source, target, rules=penstock.rules.load_rules(file), memory_limit=BUDGET, max_expansion=10**6
        )

    jax.numpy.zeros(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [time.perf_counter()]
    tiny = source.with_name("tiny.safetensors")
    make_up(tiny, {f"layers.{at}.w": 8 * 4 * COLUMNS for at in range(8)})
    convert(tiny)
    remove(target)
    times.append(time.perf_counter())
    convert(source)
    times.append(time.perf_counter())
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    found = {"begins": times[1] - times[0], "seconds": times[2] - times[1], "extra": extra}
    sys.stdout.write(f"{json.dumps(found)}\n")


THROTTLED: Final = 40 * MIB
"""Bytes a second that the slow store takes of each process."""


class ThrottledStore(StoreWrapper):
    """The local store, to which this process has a slow line."""

    def __init__(self) -> None:
        super().__init__(LocalStore())
        self._line = Lock()

    def create_data_file(self, path: str) -> DataFile:
        return cast("DataFile", ThrottledFile(self.inner.create_data_file(path), self._line))


class ThrottledFile:
    """A file over that line."""

    def __init__(self, inner: DataFile, line: Lock) -> None:
        self._inner, self._line = inner, line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._line:
            time.sleep(sum(map(len, buffers)) / THROTTLED)

        self._inner.write_at(offset, buffers)


def run_shared(source: Path, target: Path, rule: str, place: str) -> None:
    """Convert in this process together with others, and print seconds."""
    import jax

    import penstock

    port, index, count = map(int, place.split(","))
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, index)

    rules = source.with_suffix(f".{rule}.{index}.toml")
    rules.write_text(RULES[rule])
    began = time.perf_counter()
    penstock.sync.convert(
        source,
        target,
        rules=penstock.rules.load_rules(rules),
        store=ThrottledStore(),
        max_expansion=10**6,
        memory_limit=BUDGET,
    )
    sys.stdout.write(f"{json.dumps({'seconds': time.perf_counter() - began})}\n")


def rows_of_processes(folder: Path, nbytes: int, rounds: int, rules: Sequence[str]) -> list[str]:
    """Let one process and two convert into a slow store, by turns."""
    source = folder / "source.safetensors"
    make_up(source, {f"layers.{at}.w": nbytes // 8 for at in range(8)})
    lines = [
        "| rule, into a store that takes 40 MiB/s of each process | one, s | two, s | of one |",
        "| --- | --- | --- | --- |",
    ]
    for rule in rules:
        found: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(rounds):
            for count, runs in found.items():
                target = folder / "target"
                with socket.socket() as held:
                    held.bind(("127.0.0.1", 0))
                    port = held.getsockname()[1]

                command = [sys.executable, "-m", "tests.bench.conversion", "--together", source, target, rule]
                started = [
                    subprocess.Popen([*map(str, command), f"{port},{index},{count}"], stdout=subprocess.PIPE)
                    for index in range(count)
                ]
                said = [process.communicate()[0] for process in started]
                assert not any(process.returncode for process in started), "a process failed"
                runs.append(max(json.loads(each.splitlines()[-1])["seconds"] for each in said))
                remove(target)

        one, two = (median(runs) for runs in found.values())
        verdict = "pass" if two <= MOST_SHARED * one else "short"
        lines.append(f"| {rule} | {one:.2f} | {two:.2f} | {two / one:.2f} ({verdict}) |")
        sys.stdout.write(f"{lines[-1]}\n")
        sys.stdout.flush()

    remove(source)
    return lines


def in_process(way: str, source: Path, target: Path, rule: str) -> dict[str, float]:
    """Convert in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.conversion", "--here", way, source, target, rule]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def rows_of_time(folder: Path, nbytes: int, rounds: int, rules: Sequence[str]) -> list[str]:
    """Measure each rule beside `cp` and a script, by turns."""
    source = folder / "source.safetensors"
    make_up(source, {f"layers.{at}.w": nbytes // 8 for at in range(8)})
    lines = [
        (
            "| rule | cp, s | penstock, s | of cp | script, s "
            "| extra memory, MiB | script's | to begin, s | script's |"
        ),
        "|" + " --- |" * 9,
    ]
    for rule in rules:
        copied: list[float] = []
        found: dict[str, list[dict[str, float]]] = {"penstock": [], "script": []}
        for _ in range(rounds):
            target = folder / "copy.safetensors"
            began = time.perf_counter()
            copy(source, target)
            copied.append(time.perf_counter() - began)
            remove(target)
            for way, runs in found.items():
                runs.append(in_process(way, source, target, rule))
                remove(target)

        ours, theirs = (median([run["seconds"] for run in runs]) for runs in found.values())
        begins, others = (median([run["begins"] for run in runs]) for runs in found.values())
        extra, most = (max([run["extra"] for run in runs]) / MIB for runs in found.values())
        part = median(copied) / ours
        verdict = "pass" if part >= WANTED[rule] and ours <= theirs and extra <= MOST_EXTRA / MIB else "short"
        seconds = f"{median(copied):.2f} | {ours:.2f} | {part:.2f} ({verdict}) | {theirs:.2f}"
        lines.append(f"| {rule} | {seconds} | {extra:.0f} | {most:.0f} | {begins:.2f} | {others:.2f} |")
        sys.stdout.write(f"{lines[-1]}\n")
        sys.stdout.flush()

    remove(source)
    return lines


def rows_of_memory(folder: Path, nbytes: int, large: int, rules: Sequence[str]) -> list[str]:
    """Convert many times the budget, of which so much is one leaf.

    On the disk are the source, the result, and of what is transposed the temporary file of the large leaf.
    """
    source = folder / "source.safetensors"
    rest = {f"layers.{at}.w": (nbytes - large) // 7 // COLUMNS // 8 * COLUMNS * 8 for at in range(1, 8)}
    lines = [f"| {nbytes / GIB:.0f} GiB | s | extra memory, MiB |"]
    for rule in rules:
        # To stack they have one shape.
        leaves = (
            {"layers.0.w": large, **rest}
            if rule != "stack"
            else {f"layers.{at}.w": nbytes // 8 for at in range(8)}
        )
        make_up(source, leaves)
        found = in_process("penstock", source, folder / "target.safetensors", rule)
        remove(folder / "target.safetensors")
        remove(source)
        verdict = "pass" if found["extra"] <= MOST_EXTRA else "short"
        lines.append(f"| {rule} | {found['seconds']:.0f} | {found['extra'] / MIB:.0f} ({verdict}) |")
        sys.stdout.write(f"{lines[-1]}\n")
        sys.stdout.flush()

    return lines


def main() -> int:
    """Print tables; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="of the source, where time is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=RULES, help="measure this rule; repeatable")
    parser.add_argument("--whole", type=float, default=0.0, metavar="GIB", help="measure memory with so much")
    parser.add_argument("--leaf", type=float, metavar="GIB", help="of them are one leaf; a third by default")
    parser.add_argument(
        "--here", nargs=4, metavar=("WAY", "SOURCE", "TARGET", "RULE"), help=argparse.SUPPRESS
    )
    parser.add_argument("--shared", action="store_true", help="measure one process and two, and a slow store")
    parser.add_argument(
        "--together", nargs=4, metavar=("SOURCE", "TARGET", "RULE", "PLACE"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.together:
        source, target, rule, place = options.together
        run_shared(Path(source), Path(target), rule, place)
        return 0
    if options.here:
        way, source, target, rule = options.here
        run_here(way, Path(source), Path(target), rule)
        return 0

    rules = options.only or list(RULES)
    with tempfile.TemporaryDirectory(prefix="penstock-conversion-") as name:
        folder = Path(name)
        if options.whole:
            large = int((options.leaf or options.whole / 3) * GIB)
            lines = rows_of_memory(folder, int(options.whole * GIB), large, rules)
        elif options.shared:
            lines = rows_of_processes(folder, int(options.gib * GIB), options.rounds, rules)
        else:
            lines = rows_of_time(folder, int(options.gib * GIB), options.rounds, rules)

    return int(any("short" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
