"""What the primary does for thousands of others: the real stages, and parts as others bring them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.bench.stalls import Heartbeat, beating, noise_floor
from tests.proofs.memory import forget_peak, resident
from tests.proofs.simulation.services import CountedKeyValues, EveryoneElse

from penstock.checkpointer.engine import make_engine
from penstock.checkpointer.parts import CheckpointerParts
from penstock.config import Config, JobLimits
from penstock.handlers import default_handlers
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.leaves import sharding
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel import (
    KeyKind,
    LeafSpec,
    MemoryRegulator,
    ParamInfo,
    Replicas,
    SavePlan,
    SaveRun,
    Threads,
    Written,
    WrittenBatch,
)
from penstock.kernel.messages.joint_plan import JointPlan
from penstock.kernel.messages.save import Leaves
from penstock.kernel.pipeline.run_context import HandlerWork, SaveRequest
from penstock.kernel.protocols.written import WrittenTable
from penstock.stages import Commit, Finalize
from penstock.stages.agree import agree_on_place
from penstock.stages.joint.part_columns import encoded_part

P: Any = PartitionSpec  # which jax does not annotate
ROW = (1, 16)  # what each process holds of each leaf
CHUNK_NBYTES = 64
SAVES = ("first_s", "again_s")
LIMITS = JobLimits(join_s=400.0, write_s=400.0, silence_s=300.0, beat_s=1.0, call_s=100.0)


@dataclass(frozen=True)
class Tree:
    """A tree of which each process holds a row of each leaf."""

    n_leaves: int
    n_processes: int
    infos: Sequence[ParamInfo]
    specs: Sequence[LeafSpec]

    @classmethod
    def of(cls, n_leaves: int, n_processes: int) -> Tree:
        """Make it as a model has it: layers with eight arrays each, sharded over all processes."""
        shape = (n_processes, ROW[1])
        text = _sharding_text(n_processes)
        spec = LeafSpec(
            "jax.Array", shape, "float32", 4, ROW, ROW, sharding=text, replicas=Replicas(is_global=True)
        )
        keys = [("params", f"layer_{at // 8:05}", f"w{at % 8}") for at in range(n_leaves)]
        kinds = (KeyKind.MAPPING,) * 3
        infos = [ParamInfo(each, kinds, "".join(f"[{key!r}]" for key in each)) for each in keys]
        return cls(n_leaves, n_processes, infos, [spec] * n_leaves)

    def written_by(self, process: int) -> WrittenBatch:
        """Return what one process says that it wrote."""
        file, sums = data_file(process), random.Random(process)
        written = [
            Written(at, (process, 0), 0, file, at * CHUNK_NBYTES, CHUNK_NBYTES, sums.getrandbits(32))
            for at in range(self.n_leaves)
        ]
        return WrittenBatch((), WrittenTable.of(written, self.specs))

    def parts(self) -> Iterator[bytes]:
        """Yield what each process but the primary brings."""
        for process in range(1, self.n_processes):
            yield b"=" + encoded_part([self.written_by(process)])


def data_file(process: int) -> str:
    """Return where a process writes."""
    return f"ocdbt.process_{process}/d/{process:032x}"


def _sharding_text(n_processes: int) -> str:
    """Return the text for one device in each process, as long as with a real mesh of that size."""
    import jax

    one = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P("x"))
    text = sharding.encode(one) or ""
    ids = ", ".join([f'{{"id": {at}}}' for at in range(n_processes)])
    return text.replace('"shape": [1]', f'"shape": [{n_processes}]').replace('{"id": 0}', ids)


async def save_as_primary(n_leaves: int, n_processes: int, folder: Path) -> dict[str, Any]:
    """Save a tree twice: the second time, what depends on the tree alone is known.

    Args:
        n_leaves: Of the tree.
        n_processes: Each holds a row of each leaf.
        folder: Where the last checkpoint stays, with data files of the right length that hold no bytes.
    """
    tree = Tree.of(n_leaves, n_processes)
    began = time.process_time()
    parts = list(tree.parts())
    told_s = (time.process_time() - began) / max(len(parts), 1)
    service = CountedKeyValues(EveryoneElse(n_processes, b"plan", parts))
    of_checkpointer = CheckpointerParts(
        Config(),
        MemoryRegulator(2**30),
        default_handlers(entry_points=False),
        coordinator=JobCoordinator(service, 0, n_processes, LIMITS),
    )
    engine = make_engine(of_checkpointer)
    handlers = [engine.registry.for_typestr("jax.Array", "")] * n_leaves
    plan = SavePlan(
        infos=tree.infos,
        specs=tree.specs,
        handlers=handlers,
        joint=JointPlan(shares=[CHUNK_NBYTES] * n_leaves, digest=b"plan", held_whole={}, options={}),
    )
    found: dict[str, Any] = {"leaves": n_leaves, "processes": n_processes, "part_s": told_s}
    found["parts_bytes"] = sum(map(len, parts))
    threads = Threads()
    forget_peak()
    before = resident("VmRSS")
    stalls: dict[str, float] = {}
    async with beating() as heartbeat:
        idle_s = await noise_floor(heartbeat)
        for number, name in enumerate(SAVES):
            path = str(folder / f"step_{number}")
            run = engine.save_run(SaveRequest(path), threads, HandlerWork())
            took, stalls[name] = await _save(run, tree, plan, name, heartbeat)
            found |= took

        found["idle_s"] = max(idle_s, await noise_floor(heartbeat))

    found["stall_s"] = max(stalls.values())
    found["peak_mib"] = (resident("VmHWM") - before) / 2**20
    found |= {name: _nbytes(folder / "step_1", files) for name, files in _DOCUMENTS.items()}
    return found


async def _save(
    run: SaveRun, tree: Tree, plan: SavePlan, name: str, heartbeat: Heartbeat
) -> tuple[dict[str, float], float]:
    """Do what the primary does once its own arrays are written; see `Agree`.

    Returns:
        The seconds that it took, and the longest stall of the event loop: that of making up the others' files
        apart.
    """
    operation, workspace = run.operation, run.workspace
    assert isinstance(workspace, Workspace)
    own = tree.written_by(0)
    leaves = Leaves(range(tree.n_leaves), tree.specs, None, tree.infos, plan.handlers)
    batch = WrittenBatch(leaves, own.written, plan=plan)
    heartbeat.reset()
    async with operation.running():
        await agree_on_place(run, b"plan", list)
        stall_s = heartbeat.worst_s()
        await anyio.to_thread.run_sync(_leave_data_files, workspace.path, tree)
        heartbeat.reset()
        wall, cpu = time.perf_counter(), time.process_time()
        async with Commit().open(run) as commit, Finalize().open(run) as finalize:
            actor: Any = commit
            await actor(batch)
            async for committed in actor.finish():
                publish: Any = finalize
                await publish(committed)

    took = {name: time.perf_counter() - wall, name.replace("_s", "_cpu_s"): time.process_time() - cpu}
    return took, max(stall_s, heartbeat.worst_s())


def _leave_data_files(path: Callable[[str], str], tree: Tree) -> None:
    """Make the data files of all processes, of the right length and without bytes."""
    for process in range(tree.n_processes):
        file = path(data_file(process))
        os.makedirs(os.path.dirname(file))
        with open(file, "wb") as opened:
            opened.truncate(tree.n_leaves * CHUNK_NBYTES)


_DOCUMENTS = {
    "index_bytes": ("manifest.ocdbt", "d"),
    "integrity_bytes": ("_PENSTOCK_INTEGRITY",),
    "sharding_bytes": ("_sharding",),
    "metadata_bytes": ("_METADATA", "array_metadatas"),
}


def _nbytes(path: Path, names: Sequence[str]) -> int:
    found = [path / name for name in names]
    files = [file for each in found for file in (each, *each.rglob("*")) if file.is_file()]
    return sum([file.stat().st_size for file in files])
