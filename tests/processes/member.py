"""One process of a job: runs cases one after another, each in step with the other processes."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.processes.task_stacks import tell_tasks_after

BARRIER_MS = 60_000
JAX_S = 100  #: for the others to start, and to end; by default jax waits five minutes


def main() -> None:
    began = time.perf_counter()
    rank, count, port, folder, last_words_s, backend, *cases = sys.argv[1:]
    tell_tasks_after(float(last_words_s))
    jax: Any = import_module("jax")  # once the processes are told apart, and jax annotates little of this

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address,
        int(count),
        int(rank),
        coordinator_bind_address=address,
        initialization_timeout=JAX_S,
        shutdown_timeout_seconds=JAX_S,
    )
    import anyio
    from jax._src import distributed
    from tests.processes.cases import case
    from tests.processes.job_case import Here

    client: Any = distributed.global_state.client
    for name in cases:
        client.wait_at_barrier(f"before {name}", BARRIER_MS)
        sys.stdout.write(f"==== {name}, after {time.perf_counter() - began:.1f} s\n")
        here = Here(Path(folder) / name, int(rank), int(count), client)
        try:
            result = {"value": anyio.run(case(name), here, backend=backend)}
        except BaseException:
            traceback.print_exc()
            result = {"error": f"---- process {rank}, {name}\n{traceback.format_exc()}"}

        path = Path(folder) / f"{name}.{rank}.json"
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)
        if here.leaves_at_once:  # another process is dead, and jax would wait for it
            sys.stdout.flush()
            os._exit(0)


if __name__ == "__main__":
    main()
