"""What only Linux has, taken away: everything still works, by the other way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = '''
import ctypes, os, sys
import anyio, jax, jax.numpy as jnp, numpy as np

sys.platform = "darwin"  # for penstock, which is imported below; jax has looked already
LINUX = "O_DIRECT posix_fallocate posix_fadvise copy_file_range sched_getaffinity memfd_create"
for name in LINUX.split():
    if hasattr(os, name):
        delattr(os, name)

asked = []


class Library:
    """A C library of another system."""

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        if name in ("renameat2", "fallocate", "sync_file_range", "malloc_trim", "mallopt", "statx"):
            asked.append(name)
            raise AttributeError(name)
        return getattr(self.real, name)


real = ctypes.CDLL
ctypes.CDLL = lambda name, *args, **options: Library(real(name, *args, **options))

import penstock
from penstock.errors import DestinationExistsError


async def main():
    large = np.arange(6_000_000, dtype=np.float32)  # of a length that would go past the page cache
    state = {"large": large, "w": jnp.ones((64, 64)), "step": 1}
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save("one", state))
        try:
            await (await checkpointer.save("one", state))
        except DestinationExistsError:
            print("refused to replace")
        await (await checkpointer.save("one", {**state, "step": 2}, overwrite=True))
        found = await checkpointer.restore("one", like=state)
        assert found["step"] == 2 and (found["large"] == large).all()
        assert (await checkpointer.restore("one", mmap=True))["large"][7] == 7
        assert (await checkpointer.verify("one")).status == "intact"
    async with penstock.CheckpointManager("run", keep=penstock.steps.KeepLast(1)) as manager:
        for step in (1, 2):
            await manager.save(step, state)
        await manager.wait()
    assert sorted(os.listdir("run")) == ["2", "_PENSTOCK_REPORTS.json"], os.listdir("run")
    assert sorted(os.listdir(".")) == ["one", "run"], os.listdir(".")


anyio.run(main)
print("asked for", *sorted(set(asked)))
'''


@pytest.mark.process
def test_without_what_only_linux_has_everything_works(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": "/usr/bin:/bin",
            "JAX_PLATFORMS": "cpu",
            "PENSTOCK_STORE__IO": "direct",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert "refused to replace" in run.stdout
    assert "renameat2" in run.stdout, "the exchange was tried, and its other way taken"
