"""Feeds damaged documents and checkpoints to every reader, for as long as it is told to. `make fuzz`.

Each input is read in a child process with a limit on its address space, and on its time. It is a finding if
anything but an error of penstock comes out: another exception, too much memory, too much time, the end of the
process. Inputs with an outcome not seen before (a place in the code that raised) become seeds themselves.

A finding is written to `tests/corpus/fuzz`, whose files `tests/corpus/test_fuzz_corpus.py` reads again.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

import anyio
from tests.proofs.fuzz_mutations import mutated
from tests.proofs.fuzz_targets import TARGETS, WHOLE, checkpoint_seeds, document_seeds, run_target, run_whole

import penstock

LOADED: Final = (
    "jax",
    "penstock.checkpointer.checkpointer",
    "penstock.handlers.formats.orbax.tensorstore_reads",
    "penstock.handlers.leaves.default_handlers",
    "penstock.handlers.ocdbt.database_reader",
    "penstock.stages.derive",
)
"""Imported by the parent, so that no child has to."""
KEPT: Final = Path(__file__).parents[1] / "corpus" / "fuzz"
ROOM_BYTES: Final = 2 * 2**30
"""Address space that a child may take beside what it has when it begins."""
CPU_S, WALL_S = 20, 120
"""Seconds for one input: those in which it computes, and all."""
BATCH: Final = {WHOLE: 60}
"""Inputs for each child process; of documents 2,000."""
MOST_SEEDS: Final = 400


class Input(NamedTuple):
    """Bytes for a target; for a whole checkpoint, which of its files they replace."""

    target: str
    data: bytes
    seed: str = ""
    file: str = ""

    def packed(self) -> bytes:
        about = {"target": self.target, "seed": self.seed, "file": self.file}
        return json.dumps(about).encode() + b"\n" + self.data

    @classmethod
    def unpacked(cls, packed: bytes) -> Input:
        head, _, data = packed.partition(b"\n")
        about: dict[str, str] = json.loads(head)
        return cls(about["target"], data, about["seed"], about["file"])


class Reader:
    """Reads inputs in this process, below a folder."""

    def __init__(
        self, folder: Path, checkpoints: dict[str, Path], checkpointer: penstock.Checkpointer
    ) -> None:
        self._folder = folder
        self._checkpoints = checkpoints
        self._checkpointer = checkpointer

    async def read(self, one: Input) -> penstock.errors.PenstockError | None:
        """Return the error of penstock that an input leads to, if any."""
        if one.target != WHOLE:
            return run_target(one.target, one.data, self._folder)

        seed = self._checkpoints[one.seed]
        return await run_whole(self._checkpointer, seed, one.file, one.data, self._folder)


def limit(*, seconds: bool = True) -> None:
    """Bound the address space of this process, and the time until the next call."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    if seconds:
        wind()


def wind() -> None:
    """Begin the time of one input anew. At its end the system ends the process."""
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)


def outcome(error: BaseException | None) -> str:
    """Name what came of an input: where in the code an error was raised."""
    if error is None:
        return "read"

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {Path(frame.filename).name}:{frame.lineno}"


def child(inputs: Sequence[Input], folder: Path, checkpoints: dict[str, Path]) -> int:
    """Read inputs in another process. Say in `folder` which one is being read, and what came of each."""
    pid = os.fork()
    if pid:
        return pid

    status = 1
    try:
        anyio.run(_read_all, inputs, folder, checkpoints)
        status = 0
    except BaseException:
        (folder / "problem").write_text(traceback.format_exc()[-6000:])
    finally:
        os._exit(status)


async def _read_all(inputs: Sequence[Input], folder: Path, checkpoints: dict[str, Path]) -> None:
    async with penstock.Checkpointer(memory_limit="64MiB") as checkpointer:
        reader = Reader(folder / "work", checkpoints, checkpointer)
        first = next(iter(checkpoints.values()))
        if inputs[0].target == WHOLE:  # threads and devices are not what is measured
            await checkpointer.restore(first)

        limit()
        with (folder / "log").open("w", buffering=1) as log:
            for number, one in enumerate(inputs):
                wind()
                log.write(f"{number}\n")
                log.write(f"{outcome(await reader.read(one))}\n")

        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def made_apart(folder: Path) -> dict[str, Path]:
    """Make the checkpoints in another process: whoever forks later must have no threads and no devices."""
    names = folder / "names"
    folder.mkdir()
    pid = os.fork()
    if not pid:
        try:
            made = checkpoint_seeds(folder)
            names.write_text(json.dumps({name: str(path) for name, path in made.items()}))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    os.waitpid(pid, 0)
    found: dict[str, str] = json.loads(names.read_text())
    return {name: Path(path) for name, path in found.items()}


class Fuzzer:
    """Makes inputs, has them read, and keeps what is new or wrong."""

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.outcomes: dict[str, set[str]] = {name: set() for name in (*TARGETS, WHOLE)}
        self.findings: list[Path] = []
        self._checkpoints = made_apart(folder / "seeds")
        self._seeds = {name: list(data) for name, data in document_seeds(self._checkpoints).items()}
        self._files = {
            name: [str(file.relative_to(path)) for file in sorted(path.rglob("*")) if file.is_file()]
            for name, path in self._checkpoints.items()
        }

    def round(self, target: str) -> None:
        """Feed one target for a while."""
        inputs = [self._input(target) for _ in range(BATCH.get(target, 2000))]
        done = 0
        while done < len(inputs):
            done += self._feed(inputs[done:])

    def _input(self, target: str) -> Input:
        rng = self._rng
        if target != WHOLE:
            seeds = self._seeds[target]
            return Input(target, mutated(rng, rng.choice(seeds), seeds))

        name = rng.choice(sorted(self._checkpoints))
        file = rng.choice(self._files[name])
        data = (self._checkpoints[name] / file).read_bytes()
        return Input(target, mutated(rng, data, ()), name, file)

    def _feed(self, inputs: Sequence[Input]) -> int:
        """Have inputs read by one child; return how many it read, the last one perhaps to its end."""
        folder = self._folder / "child"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        _, status = os.waitpid(child(inputs, folder, self._checkpoints), 0)
        log = folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        target = inputs[0].target
        for number, found in zip(lines[::2], lines[1::2], strict=False):
            if found not in self.outcomes[target]:
                self.outcomes[target].add(found)
                if target != WHOLE and len(self._seeds[target]) < MOST_SEEDS:
                    self._seeds[target].append(inputs[int(number)].data)

        done = (len(lines) + 1) // 2
        self.counts[target] += done
        if status:
            problem = folder / "problem"
            text = problem.read_text() if problem.exists() else f"ended with status {status:#x}"
            if not done:
                raise RuntimeError(f"the child process failed before its first input:\n{text}")

            self._keep(inputs[done - 1], text)
            return done

        return len(inputs)

    def _keep(self, one: Input, problem: str) -> None:
        packed = one.packed()
        last = problem.strip().splitlines()[-1]
        KEPT.mkdir(exist_ok=True)
        path = KEPT / f"{one.target}-{hashlib.sha256(packed).hexdigest()[:10]}"
        path.write_bytes(packed)
        self.findings.append(path)
        self._say(f"FINDING {path.name} {one.seed} {one.file}: {last}\n{problem}")


def main() -> int:
    """Run until the time is over; return the number of findings."""
    say = partial(print, flush=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--targets", nargs="*", default=[*TARGETS, WHOLE])
    options = parser.parse_args()
    for name in LOADED:
        import_module(name)

    say(f"seed {options.seed}, {options.seconds:.0f} s, targets {' '.join(options.targets)}")
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-", dir=base) as folder:
        fuzzer = Fuzzer(Path(folder), options.seed, say)
        gc.collect()
        gc.freeze()
        while time.monotonic() - began < options.seconds:
            for target in options.targets:
                fuzzer.round(target)
                if time.monotonic() - began >= options.seconds:
                    break

    seconds = time.monotonic() - began
    for target, count in fuzzer.counts.items():
        say(f"{target:<20} {count:>9} inputs, {len(fuzzer.outcomes[target]):>4} outcomes")

    say(f"{fuzzer.counts.total()} inputs in {seconds:.0f} s, {len(fuzzer.findings)} findings")
    return len(fuzzer.findings)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
