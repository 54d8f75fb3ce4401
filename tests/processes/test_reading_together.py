"""Reading what several processes saved together: by us in any number of processes, and by Orbax."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1 as ocp_v1
from tests.processes.launcher import Job, run_job
from tests.processes.trees import values

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]


def test_orbax_reads_a_joint_checkpoint_in_one_process(job: Job) -> None:
    path = job.saved()
    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in ("rows", "both", "replicated")}
    found = ocp.PyTreeCheckpointer().restore(
        path,
        args=ocp.args.PyTreeRestore(
            dict.fromkeys(restore_args, 0), restore_args=restore_args, partial_restore=True
        ),
    )

    for name in restore_args:
        np.testing.assert_array_equal(found[name], values()[name])


def test_orbax_v1_reads_a_joint_checkpoint_in_one_process(job: Job) -> None:
    wanted = {name: np.zeros_like(values()[name]) for name in ("rows", "both", "replicated")}
    context = ocp_v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = ocp_v1.load(str(job.saved()), wanted)

    for name in wanted:
        np.testing.assert_array_equal(found[name], values()[name])


def test_orbax_v1_reads_a_joint_checkpoint_in_all_processes(job: Job) -> None:
    assert job.results("orbax_v1_reads") == [{"differs": []}] * job.count


def test_orbax_reads_a_joint_checkpoint_in_all_processes(job: Job) -> None:
    assert job.results("orbax_reads") == [{"differs": []}] * job.count


def test_what_orbax_saved_from_two_processes_is_read_in_all(job: Job) -> None:
    for result in job.results("what_orbax_saved_from_two_is_read"):
        assert result["names"] >= 3
        assert len(result["differs"]) == 8
        assert all(found == [] for found in result["differs"].values()), result["differs"]


def test_each_process_reads_no_more_than_its_devices_hold(job: Job) -> None:
    for result in job.results("reads_what_its_devices_hold"):
        check_bytes_read(result)


@pytest.mark.slow
@pytest.mark.timeout(230)
def test_three_read_no_more_of_what_eight_saved(tmp_path: Path) -> None:
    eight, three = tmp_path / "eight", tmp_path / "three"
    eight.mkdir()
    three.mkdir()
    run_job(eight, 8, ["saves_large_arrays"]).results("saves_large_arrays")
    (eight / "saves_large_arrays" / "step_1").rename(three / "saved")
    for result in run_job(three, 3, ["reads_what_its_devices_hold"]).results("reads_what_its_devices_hold"):
        # The second process needs a third of two chunks. Of long rows it reads the blocks that they lie in.
        # Of `both` the rows of a chunk are 384 bytes: the disk reads pages of 4096, so all of them.
        check_bytes_read(result, ("both",))
        check_bytes_read({**result, "read": result["unverified"]}, ("both",))
        # Four chunks, of which it needs two whole and a third of each of the two others.
        assert result["read"]["both"] - result["documents"] <= 1.52 * result["need"]["both"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_another_number_of_processes_reads_no_more_than_its_devices_hold(
    job: Job, count: int, tmp_path: Path
) -> None:
    job.results("saves_large_arrays")
    shutil.copytree(job.folder / "saves_large_arrays" / "step_1", tmp_path / "saved")
    for result in run_job(tmp_path, count, ["reads_what_its_devices_hold"]).results(
        "reads_what_its_devices_hold"
    ):
        # Four processes need half the rows of each chunk that two wrote of this array.
        check_bytes_read(result, ("both",) if count > job.count else ())


def check_bytes_read(result: Any, but: Sequence[str] = ()) -> None:
    for name, need in result["need"].items():
        read = result["read"][name] - result["documents"]
        assert read >= 0.99 * need, name
        if name not in but:
            assert read <= 1.15 * need, name
