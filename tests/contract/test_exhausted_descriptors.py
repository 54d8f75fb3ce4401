"""Saves of a process that may open no more files: what they leave is gone with the next save."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SAVES = """
import contextlib, json, os, resource, sys
import anyio, numpy as np, penstock

path, each = sys.argv[1], int(sys.argv[2])
tree = {str(at): np.full(2_000, at) for at in range(20)}

def n_open():  # without what the watch of the memory reads now and then
    n = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            n += not os.readlink(f"/proc/self/fd/{number}").startswith(("/proc/", "/sys/"))

    return n

async def save_all(checkpointer):
    errors = []

    async def save(at):
        try:
            await (await checkpointer.save(f"{path}/{at}", tree, overwrite=True))
            errors.append(None)
        except penstock.PenstockError as error:
            errors.append(getattr(error, "errno", None) or repr(error))

    async with anyio.create_task_group() as tasks:
        for at in range(30):
            tasks.start_soon(save, at)

    return errors

async def main():
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(f"{path}/first", tree))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        before, taken = n_open(), []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/", os.O_RDONLY))
        for number in taken[:each]:
            os.close(number)

        failed = await save_all(checkpointer)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        left = sorted(os.listdir(path))
        more = n_open() - before - len(taken) + each
        for number in taken[each:]:
            os.close(number)

        good = await save_all(checkpointer)
        print(json.dumps([failed, left, more, good, sorted(os.listdir(path))]))

anyio.run(main)
"""
ALL = sorted(["first", *map(str, range(30))])
EXHAUSTED = 24  # EMFILE


@pytest.mark.timeout(240)
@pytest.mark.parametrize("each", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_no_directory_is_left_that_the_next_save_does_not_remove(folder: Path, each: int) -> None:
    folder.mkdir()
    command = [sys.executable, "-c", SAVES, str(folder), str(each)]
    said = subprocess.check_output(command, timeout=200)
    failed, left, more_descriptors, good, at_last = json.loads(said)

    n_saved = sum(error is None for error in failed)
    assert set(failed) <= {None, EXHAUSTED}
    assert n_saved < 30, "there were enough"
    assert len(left) == 1 + n_saved, f"left were {left}"
    assert more_descriptors == 0
    assert good == [None] * 30
    assert at_last == ALL
