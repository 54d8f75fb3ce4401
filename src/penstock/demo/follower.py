"""`python -m penstock.demo.follower OPTIONS`: restores each new step of a training.

OPTIONS are `FollowingOptions` as a JSON object. Records go to stdout, one a line.
"""

from __future__ import annotations

__all__ = ("FollowingOptions", "follow")

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import anyio
from anyio import to_thread

import penstock
from penstock.demo.corpus import Corpus
from penstock.demo.model import SIZES, init_state, train_step
from penstock.demo.records import FollowedStep, Record, emit

BUDGET_BYTES: Final = 8 * 2**20  # far less than a state has: it is read in pieces
PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class FollowingOptions:
    """Whom to follow. Equal to what that process trains with, or the losses would differ."""

    directory: str  #: of steps
    text: str  #: a file
    size: str  #: a key of `model.SIZES`
    seed: int = 0


async def follow(options: FollowingOptions, tell: Callable[[Record], object]) -> None:
    """Restore each step as it becomes durable and train one step from there, until nothing more comes.

    That step's loss is the one that the process followed had in the step after its save, to the last
    bit: so it is a full proof of what was restored.

    Args:
        options: Whom to follow.
        tell: Called in the event loop with every `FollowedStep`.

    Raises:
        PenstockError: If a restore fails.
    """
    size = SIZES[options.size]
    corpus = Corpus(await anyio.Path(options.text).read_text("utf-8"))
    like = init_state(size, corpus.vocabulary, options.seed)
    async with penstock.CheckpointManager(
        options.directory, read_only=True, memory_limit=BUDGET_BYTES
    ) as manager:
        # A step that is overtaken while this one is evaluated is skipped: its trainer may delete it.
        async for step in manager.watch(latest_only=True, timeout_s=PATIENCE_S, interval_s=0.1):
            since = time.perf_counter()
            state = await manager.restore(step, like=like)
            seconds = time.perf_counter() - since
            batch = corpus.batch(options.seed, step + 1, size)
            _, loss = await to_thread.run_sync(train_step, state, batch, size)
            del state
            budget = manager.checkpointer.statistics()
            tell(FollowedStep(step, loss.hex(), seconds, budget.peak, budget.limit))


if __name__ == "__main__":
    anyio.run(follow, FollowingOptions(**json.loads(sys.argv[1])), emit)
