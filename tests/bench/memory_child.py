"""One operation whose memory is watched from outside; see `memory`."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
from tests.bench import caches, trees
from tests.bench.contenders.everyone import others, ours
from tests.bench.contenders.protocol import Contender, InThread
from tests.bench.results import Operation
from tests.bench.trees import State


async def main(asked: dict[str, Any]) -> None:
    """Get ready, say so, wait, carry it out, say so, wait."""
    path, operation = Path(asked["path"]), Operation(asked["operation"])
    contender = chosen(asked["label"])
    if operation.reads:
        target = trees.abstract(asked["workload"], asked["scale"])
        target = trees.into_numpy(target) if operation is Operation.RESTORE_NUMPY else target
        caches.warm(path)
    else:
        target = trees.build(asked["workload"], asked["scale"])

    async with contender.running():
        await _warm_up(contender, path.with_name("warm-up"), reads=operation.reads)
        caches.settle()
        _say("ready")
        sys.stdin.readline()
        result: object = None
        if operation.reads:
            result = await contender.restore(path, target)
        else:
            await contender.save(path, target)

        _say("done")
        sys.stdin.readline()
        del result  # until now: what was restored counts


def chosen(label: str) -> Contender:
    """The contender of that name."""
    found: list[Contender] = [*ours()]
    if label not in {contender.label for contender in found}:
        found = [InThread(blocking) for blocking in others(with_orbax=label.startswith("Orbax"))]

    return next(contender for contender in found if contender.label == label)


async def _warm_up(contender: Contender, path: Path, *, reads: bool) -> None:
    """Have modules imported, threads started and caches made, which are no part of an operation."""
    state = State({name: jnp.full((256, 1024), at, jnp.float32) for at, name in enumerate("ab")})
    await contender.save(path, state)
    if reads:
        await contender.restore(path, trees.into_jax(state))

    shutil.rmtree(path)


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    anyio.run(main, json.loads(sys.argv[1]))
