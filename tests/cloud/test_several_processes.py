"""Several processes save to a bucket of a real server together."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cloud.servers import BUCKET, Server
from tests.object_server import BUCKET as EXPECTED
from tests.processes.launcher import run_job

import penstock.sync

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _s3(environ: Server) -> None:
    if environ.scheme != "s3":
        pytest.skip("the cases speak s3://")
    assert BUCKET == EXPECTED


def test_two_processes_save_restore_and_keep_steps(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, ["saves_to_a_bucket", "a_bucket_keeps_steps"])
    for result in done.results("saves_to_a_bucket"):
        assert (result["differs"], result["intact"], result["left"]) == ([], [True, True], [])
    for result in done.results("a_bucket_keeps_steps"):
        assert result == {"steps": [2, 3], "differs": []}


def test_who_is_killed_is_named_and_the_next_save_takes_over(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, ["one_dies_saving_to_a_bucket"])
    assert done.result("one_dies_saving_to_a_bucket", 0)["told"] == ["PeerSilentError", [1], "write"]
    url = f"s3://{BUCKET}/killed/2"
    penstock.sync.save(url, {"x": 1})
    assert penstock.sync.restore(url)["x"] == 1
