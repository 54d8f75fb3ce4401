"""What a job of one process does not pay for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import anyio, jax.numpy as jnp, penstock

async def main():
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(sys.argv[1], {"x": jnp.arange(3)}))
        await checkpointer.restore(sys.argv[1])

anyio.run(main)
print(json.dumps([name for name in sys.modules if name.startswith("penstock.")]))
"""
TOGETHER = (
    "penstock.handlers.coordinators.j",  # of a job, and of jax's service
    "penstock.handlers.coordinators.membership",
    "penstock.handlers.coordinators.operation_keys",
    "penstock.handlers.coordinators.procedures",
    "penstock.handlers.coordinators.recorded_answers",
    "penstock.handlers.coordinators.silence",
    "penstock.kernel.messages.joint_plan",
    "penstock.stages.agree",
    "penstock.stages.joint",
)
OPTIONS = "penstock.handlers.coordinators.job_options"


@pytest.mark.process
def test_one_process_loads_nothing_of_what_several_need(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "x")], check=True, capture_output=True, text=True
    )
    loaded: list[str] = json.loads(run.stdout)

    assert "penstock.stages.commit" in loaded
    assert [name for name in loaded if name.startswith(TOGETHER) and name != OPTIONS] == []
