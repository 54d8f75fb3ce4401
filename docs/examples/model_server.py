"""Serves a model, and swaps in each new checkpoint of it while requests go on.

    uvicorn --factory model_server:from_environment     # CHECKPOINTS=run

The directory is a root of steps, which a training process saves into with a `CheckpointManager`. This one
follows it: each new step is restored beside the requests, under a memory budget of its own, and no
penstock on this machine deletes the step meanwhile. The restore gives the event loop up between all its
parts, and the new weights replace the old ones in one assignment: a request sees one set or the other, whole.
"""

from __future__ import annotations

__all__ = ("ModelServer", "from_environment")

import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import penstock


class ModelServer:
    """The application, and the weights that it serves.

    Args:
        directory: The root of steps; it need not be there yet.
        memory_limit: Host bytes that restoring may hold beyond the weights themselves.
        interval_s: Seconds between two looks at the directory, where it does not tell of changes itself.
    """

    def __init__(
        self, directory: Path, *, memory_limit: int | str = "64MiB", interval_s: float = 1.0
    ) -> None:
        self.step = -1  #: of the weights that are served; -1 before the first
        self.swapping = False  #: whether a restore is under way
        self.failures: list[Exception] = []  #: of restores; the weights before stay in service
        self._weights: Any = None
        self._directory = directory
        self._memory_limit = memory_limit
        self._interval_s = interval_s
        self.app = Starlette(
            routes=[Route("/predict", self._predict, methods=["POST"]), Route("/step", self._say_step)],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        async with (
            penstock.CheckpointManager(
                self._directory, read_only=True, memory_limit=self._memory_limit
            ) as manager,
            anyio.create_task_group() as tasks,
        ):
            latest = manager.latest_step()
            if latest is not None:  # no request comes before the first weights, if there are any
                await self._swap(manager, latest)

            tasks.start_soon(self._follow, manager, latest)
            yield
            tasks.cancel_scope.cancel()  # a restore that is under way gives back all it holds

    async def _follow(self, manager: penstock.CheckpointManager, latest: int | None) -> None:
        async for step in manager.watch(after=latest, latest_only=True, interval_s=self._interval_s):
            await self._swap(manager, step)

    async def _swap(self, manager: penstock.CheckpointManager, step: int) -> None:
        self.swapping = True
        try:
            restored = await manager.restore(step)
        except penstock.PenstockError as error:
            self.failures.append(error)  # damaged: what is served stays
        else:
            self.step, self._weights = step, restored
        finally:
            self.swapping = False

    async def _predict(self, request: Request) -> JSONResponse:
        step, weights = self.step, self._weights  # one set, whatever is swapped in meanwhile
        if weights is None:
            return JSONResponse({"error": "no checkpoint yet"}, status_code=503)

        x = np.asarray((await request.json())["x"], np.float32)
        y = x @ weights["w"] + weights["b"]
        return JSONResponse({"step": step, "y": y.tolist()})

    async def _say_step(self, _: Request) -> JSONResponse:
        return JSONResponse({"step": self.step})


def from_environment() -> Starlette:
    """Return the application for the directory that `CHECKPOINTS` names."""
    return ModelServer(Path(os.environ["CHECKPOINTS"])).app
