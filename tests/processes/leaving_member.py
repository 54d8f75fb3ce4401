"""One process of a job that leaves in the ordinary way, although another one is dead."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    rank, count, port, folder, shutdown_s = sys.argv[1:]
    jax: Any = import_module("jax")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address,
        int(count),
        int(rank),
        coordinator_bind_address=address,
        shutdown_timeout_seconds=int(shutdown_s),
    )
    import anyio

    told = anyio.run(_save, Path(folder), int(rank) == int(count) - 1)
    (Path(folder) / f"told.{rank}").write_text(told)


async def _save(folder: Path, is_last: bool) -> str:
    import numpy as np
    from tests.processes.job_case import HASTY, checkpointer, told_by

    async with checkpointer(limits=HASTY) as opened:
        await (await opened.save(folder / "step_1", {"x": np.arange(3)}))
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

        return str(await told_by(await opened.save(folder / "step_2", {"x": np.arange(3)})))


if __name__ == "__main__":
    main()
