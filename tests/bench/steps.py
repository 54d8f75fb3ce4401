"""A directory of many steps, made in seconds, and what is asked of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import msgpack
import numpy as np
from anyio import to_thread
from tests.bench.contenders.managers import METRIC, StepsContender
from tests.bench.results import Note, Operation, Results, Sample, Size
from tests.bench.workloads import Workload

import penstock
from penstock.handlers.formats.integrity import digest_of
from penstock.handlers.formats.orbax.checkpoint_documents import encode_mark
from penstock.handlers.formats.orbax.file_names import COMMIT_MARK, INTEGRITY

N_FEW: Final = 4
EVERY: Final = 10  # the numbers of the steps are apart by this


async def measure_steps(
    workload: Workload, n_steps: int, rounds: int, folder: Path, contenders: Sequence[StepsContender]
) -> Results:
    """Make the directory, and have everybody open it in turn, each round beginning with another one."""
    results = Results(sizes=[Size(workload.name, workload.title, n_steps, 0, "step")])
    root, few = folder / "root", folder / "few"
    _say(f"making {n_steps:,} steps")
    await make_root(root, n_steps)
    await make_root(few, N_FEW)
    bench = _Bench(workload, results)
    for contender in contenders:  # what it imports and starts is no part of opening
        await bench.carry_out(contender, few, N_FEW, None)

    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            if number < workload.fewer.get(contender.label, rounds):
                _say(f"round {number + 1}: {contender.label}")
                await bench.carry_out(contender, root, n_steps, number)

    return results


@final
class _Bench:
    def __init__(self, workload: Workload, results: Results) -> None:
        self._workload, self._results = workload, results
        self._out: set[str] = set()

    async def carry_out(
        self, contender: StepsContender, root: Path, n_steps: int, number: int | None
    ) -> None:
        """Ask everything of one; whoever fails once, or says what is not so, is out. Timed with a number."""
        if contender.label in self._out:
            return

        try:
            for answer in (*await contender.look(root), *await contender.find_best(root)):
                check(answer.said, answer.operation, n_steps)
                if number is not None:
                    timed = (self._workload.name, contender.label, answer.operation, number, answer.seconds)
                    self._results.samples.append(Sample(*timed))
        except Exception as error:
            self._out.add(contender.label)
            samples = [s for s in self._results.samples if s.contender != contender.label]
            self._results.samples = samples
            text = f"{type(error).__name__}: {error}"[:300]
            self._results.notes.append(Note(self._workload.name, contender.label, text, failed=True))


def check(answer: object, operation: Operation, n_steps: int) -> None:
    """Raise `WrongStepsError` unless the answer is right."""
    if operation is Operation.LATEST:
        wanted: object = EVERY * (n_steps - 1)
    elif operation is Operation.ALL_STEPS:
        wanted = list(range(0, EVERY * n_steps, EVERY))
    else:
        wanted = best_of(n_steps) if operation is Operation.BEST else None

    if (sorted(answer) if isinstance(answer, (list, tuple)) else answer) != wanted:
        raise WrongStepsError(f"{operation} said {str(answer)[:50]}, and not {str(wanted)[:50]}")


class WrongStepsError(Exception):
    """A contender says something else than what lies in the directory."""


def loss(at: int) -> float:
    """The metric of the step at that place: no two alike among those that have one."""
    return 1.0 + ((at + 1234) * 7919 % 10007) / 10007


def best_of(n_steps: int) -> int:
    """The step with the least loss."""
    return EVERY * min(range(0, n_steps, 2), key=loss)


async def make_root(root: Path, n_steps: int) -> None:
    """Fill a directory with steps as the manager leaves them.

    Two are saved. The others are linked to their files, so that 20,000 take no room, but for the metrics:
    every second step has its own.
    """
    template = root.with_name("template")
    tree = {"weights": np.arange(8, dtype=np.float32)}
    async with penstock.CheckpointManager(template) as manager:
        for step, metrics in ((0, {METRIC: 1.0}), (1, None)):
            saving = await manager.save(step, tree, metrics=metrics)
            assert saving is not None
            await saving

    await to_thread.run_sync(_link_all, template, root, n_steps)
    shutil.rmtree(template)


def _link_all(template: Path, root: Path, n_steps: int) -> None:
    root.mkdir()
    kinds = [_contents(template / "0"), _contents(template / "1")]
    metrics = os.path.join("metrics", "metrics")
    for at in range(n_steps):
        step = f"{root}/{at * EVERY}"
        os.mkdir(step)
        folders, files = kinds[at % 2]
        for folder in folders:
            os.mkdir(f"{step}/{folder}")
        for name, source in files:
            if name not in {metrics, INTEGRITY, COMMIT_MARK} or at % 2:
                os.link(source, f"{step}/{name}")
        if not at % 2:
            _write_metrics(template / "0", step, metrics, json.dumps({METRIC: loss(at)}).encode())


def _write_metrics(template: Path, step: str, name: str, data: bytes) -> None:
    """Write the metrics of a step, with its record of digests and its commit mark, which have theirs."""
    members: dict[str, Any] = msgpack.unpackb((template / INTEGRITY).read_bytes())
    documents = members["documents"]
    at, digest = documents["names"].index(name), digest_of(data)
    for column, dtype, value in (("nbytes", "<u8", digest.nbytes), ("crc32c", "<u4", digest.crc32c)):
        values = np.frombuffer(documents[column], dtype).copy()
        values[at] = value
        documents[column] = values.tobytes()

    record = msgpack.packb(members)
    Path(step, name).write_bytes(data)
    Path(step, INTEGRITY).write_bytes(record)
    Path(step, COMMIT_MARK).write_bytes(encode_mark(record))


def _contents(step: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """The folders of a step, those that hold others first, and its files, with where they are."""
    found = sorted(step.rglob("*"))
    folders = [str(path.relative_to(step)) for path in found if path.is_dir()]
    return folders, [(str(path.relative_to(step)), str(path)) for path in found if path.is_file()]


def _say(text: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] steps: {text}\n")
    sys.stderr.flush()
