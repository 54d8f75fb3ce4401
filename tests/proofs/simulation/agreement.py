"""All processes of a job go through one operation, as a save does, in one process of this machine."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import Any, cast

from anyio import create_task_group
from tests.proofs.simulation.services import CountedKeyValues, SimulatedCalls, SimulatedService, Traffic
from tests.real_service import real_service

from penstock.config import JobLimits
from penstock.handlers.coordinators.job import Job
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.handlers.coordinators.procedures import Member

PATIENT = JobLimits(join_s=400.0, write_s=400.0, silence_s=300.0, beat_s=60.0, call_s=100.0)
"""All share one machine here, so none may be called silent; what heartbeats cost is measured apart."""

PART = b"=" + bytes(range(256)) * 2
"""What each tells of what it wrote; a part above 16 KiB goes by file instead."""

OPERATIONS = 2  # of the second, connections and caches are warm


async def agree_by_the_service(n_processes: int) -> dict[str, Any]:
    """Measure with the coordination service of jax, a client for each process, as in a job."""
    with real_service(n_processes, init_timeout=100) as views:
        seen = [CountedKeyValues(view) for view in views]
        coordinators = [JobCoordinator(view, index, n_processes, PATIENT) for index, view in enumerate(seen)]

        def operations(path: str) -> list[JointOperation]:
            found = [coordinator.operation(path) for coordinator in coordinators]
            return [each for each in found if isinstance(each, JointOperation)]

        return await _measure(operations, [view.traffic for view in seen])


async def agree_in_memory(n_processes: int) -> dict[str, Any]:
    """Measure with a service in memory, for more processes than this machine has threads for."""
    service = SimulatedService()
    calls = [SimulatedCalls(service) for _ in range(n_processes)]
    jobs = [
        Job(cast("Any", each), Member(index, range(n_processes), limits=PATIENT))
        for index, each in enumerate(calls)
    ]

    def operations(path: str) -> list[JointOperation]:
        return [JointOperation(job, path) for job in jobs]

    return await _measure(operations, [each.traffic for each in calls])


async def _measure(operations: Any, traffic: Sequence[Traffic]) -> dict[str, Any]:
    found: dict[str, Any] = {"processes": len(traffic)}
    for number in range(OPERATIONS):
        for each in traffic:
            each.reset()

        wall, cpu = time.perf_counter(), time.process_time()
        async with create_task_group() as tasks:
            for operation in operations(f"/run/{number}"):
                tasks.start_soon(_take_part, operation)

        found |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}

    primary, workers = traffic[0], traffic[1:]
    return found | {
        "calls_primary": primary.calls,
        "calls_worker": max([each.calls for each in workers]),
        "keys_primary": len(primary.asked),
        "keys_worker": max([len(each.asked) for each in workers]),
        "sent_primary": primary.sent,
        "received_primary": primary.received,
        "sent_worker": max([each.sent for each in workers]),
        "received_worker": max([each.received for each in workers]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def _take_part(operation: JointOperation) -> None:
    """Do what a save does, but for reading and writing arrays."""
    async with operation.running():
        await operation.compare(b"plan", list)
        if operation.is_primary:
            await operation.begin("/run/place")
            await operation.parts()
            await operation.decide()
            await operation.tell_published()
        else:
            await operation.wait_begun(b"plan", list)
            await operation.bring(PART)
            await operation.wait_decided()
            await operation.wait_published()
