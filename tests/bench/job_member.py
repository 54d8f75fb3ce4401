"""One process of a benchmark of several that save and restore one tree together."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
import warnings
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, final

BARRIER_MS = 120_000
N_LEAVES = 4
ROW_BYTES = 4096


def main() -> None:
    rank, count = map(int, sys.argv[1:3])
    port, folder, asked = sys.argv[3:]
    warnings.simplefilter("ignore")
    jax: Any = import_module("jax")  # once the processes are told apart
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    logging.disable(logging.CRITICAL)
    import anyio

    told = anyio.run(_Member(rank, Path(folder), json.loads(asked)).measure)
    part = Path(folder) / f"told.{rank}.part"
    part.write_text(json.dumps(told))
    part.rename(part.with_suffix(""))


@final
class _Member:
    def __init__(self, rank: int, folder: Path, asked: dict[str, Any]) -> None:
        from jax._src import distributed

        self._rank, self._folder, self._asked = rank, folder, asked
        self._client: Any = distributed.global_state.client
        self._n_met = 0
        self._samples: list[dict[str, Any]] = []
        self._checked: list[list[str]] = []
        self._wrong: list[list[str]] = []

    async def measure(self) -> dict[str, Any]:
        """Do every operation by every contender in turn, each round beginning with another one."""
        from tests.bench.contenders.orbax import Orbax
        from tests.bench.contenders.penstock import Penstock
        from tests.bench.contenders.protocol import InThread
        from tests.bench.results import Operation
        from tests.bench.trees import into_jax

        state = tree_of(self._asked["nbytes"])
        contenders: list[Any] = [Penstock(), *([InThread(Orbax())] if self._asked["orbax"] else [])]
        target = into_jax(state)
        async with AsyncExitStack() as stack:
            for contender in contenders:
                await stack.enter_async_context(contender.running())
                await self._warm_up(contender, state, target)

            for number in range(self._asked["rounds"]):
                first = number % len(contenders)
                for operation in (Operation.SAVE, Operation.RESTORE_JAX):
                    for contender in (*contenders[first:], *contenders[:first]):
                        await self._one(number, operation, contender, state, target)

        return {
            "n_leaves": len(state.leaves),
            "nbytes": state.nbytes,
            "samples": self._samples,
            "checked": self._checked,
            "wrong": self._wrong,
        }

    async def _warm_up(self, contender: Any, state: Any, target: Any) -> None:
        path = self._folder / f"warm-up-{contender.label}"
        await contender.save(path, state)
        await contender.restore(path, target)
        self._meet()
        if self._rank == 0:
            shutil.rmtree(path)

    async def _one(self, number: int, operation: Any, contender: Any, state: Any, target: Any) -> None:
        from tests.bench import caches

        path = self._folder / contender.label
        if self._rank == 0:
            if operation.reads:
                caches.warm(path)
            else:
                shutil.rmtree(path, ignore_errors=True)
        caches.settle()
        self._meet()
        since, cpu_since = time.perf_counter(), time.process_time()
        if operation.reads:
            found = await contender.restore(path, target)
        else:
            found = await contender.save(path, state)

        cpu_s = time.process_time() - cpu_since
        self._meet()  # it is over when all have it
        seconds = time.perf_counter() - since
        of: list[Any] = [contender.label, str(operation), number]
        self._samples.append({"of": of, "seconds": seconds, "cpu_s": cpu_s})
        if operation.reads and of[:2] not in self._checked:
            self._checked.append(of[:2])
            self._wrong += [[contender.label, problem] for problem in differences(found, state)]

    def _meet(self) -> None:
        self._n_met += 1
        self._client.wait_at_barrier(f"bench {self._n_met}", BARRIER_MS)


def tree_of(nbytes: int) -> Any:
    """Return arrays of normal numbers, by rows over the devices of all processes."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tests.bench.trees import State

    devices: Any = np.array(jax.devices())
    spec: Any = PartitionSpec
    sharding = NamedSharding(Mesh(devices, ("x",)), spec("x"))
    n_rows = nbytes // (N_LEAVES * ROW_BYTES * len(devices)) * len(devices)
    make: Any = jax.make_array_from_callback

    def array(seed: int) -> Any:
        shape = (n_rows, ROW_BYTES // 4)

        def rows(index: Any) -> Any:
            start, stop, _ = index[0].indices(n_rows)
            return np.random.default_rng([seed, start]).standard_normal((stop - start, shape[1]), np.float32)

        return make(shape, sharding, rows)

    return State({f"array_{at}": array(at) for at in range(N_LEAVES)})


def differences(found: Any, state: Any) -> list[str]:
    """Name the leaves that are not bit for bit what was saved, as far as this process has them."""
    import jax
    import numpy as np

    wrong: list[str] = []
    for name, one, other in zip(state.names, jax.tree.leaves(found), state.leaves, strict=True):
        alike = one.sharding.is_equivalent_to(other.sharding, other.ndim) and all(
            np.array_equal(np.asarray(a.data).view(np.uint8), np.asarray(b.data).view(np.uint8))
            for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True)
        )
        if not alike:
            wrong.append(f"{name} differs")

    return wrong


if __name__ == "__main__":
    main()
