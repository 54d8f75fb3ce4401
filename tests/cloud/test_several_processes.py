"""Several processes save to a bucket of a real server together."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.cloud.servers import BUCKET, Server
from tests.object_server import BUCKET as EXPECTED
from tests.processes.bucket_conversions import a_killed_conversion_is_made_again, conversions_agree
from tests.processes.launcher import ROOT, run_job

import penstock.sync

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


ORBAX = textwrap.dedent(
    """
    import sys
    import fsspec

    endpoint, url = sys.argv[1:]
    fsspec.config.conf["gcs"] = fsspec.config.conf["gs"] = {"endpoint_url": endpoint, "token": "anon"}
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from tests.processes.trees import values

    expected = values()
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), expected)
    found = ocp.PyTreeCheckpointer().restore(url, item=expected, restore_args=how)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    """
)


@pytest.fixture
def s3(environ: Server) -> None:
    if environ.scheme != "s3":
        pytest.skip("the cases speak s3://")
    assert BUCKET == EXPECTED


@pytest.mark.usefixtures("s3")
def test_two_processes_save_restore_and_keep_steps(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, ["saves_to_a_bucket", "a_bucket_keeps_steps"])
    for result in done.results("saves_to_a_bucket"):
        assert (result["differs"], result["intact"], result["left"]) == ([], [True, True], [])
    for result in done.results("a_bucket_keeps_steps"):
        assert result == {"steps": [2, 3], "differs": []}


@pytest.mark.usefixtures("s3")
def test_who_is_killed_is_named_and_the_next_save_takes_over(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, ["one_dies_saving_to_a_bucket"])
    assert done.result("one_dies_saving_to_a_bucket", 0)["told"] == ["PeerSilentError", [1], "write"]
    url = f"s3://{BUCKET}/killed/2"
    penstock.sync.save(url, {"x": 1})
    assert penstock.sync.restore(url)["x"] == 1


@pytest.mark.usefixtures("s3")
def test_two_processes_convert_from_a_bucket_and_to_one(tmp_path: Path) -> None:
    conversions_agree(tmp_path)


@pytest.mark.usefixtures("s3")
def test_a_conversion_of_which_one_is_killed_is_made_again(tmp_path: Path) -> None:
    a_killed_conversion_is_made_again(tmp_path)


def test_two_processes_save_by_orbaxs_names(
    environ: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_BUCKET", environ.bucket)
    done = run_job(tmp_path, 2, ["orbaxs_names_save_to_a_bucket", "orbaxs_managers_save_to_a_bucket"])
    for result in done.results("orbaxs_names_save_to_a_bucket"):
        assert (result["sync"], result["standard"], result["all"], result["left"]) == ([], [], [], [])
    for result in done.results("orbaxs_managers_save_to_a_bucket"):
        assert (result["steps"], result["again"], result["state"], result["left"]) == ([1, 3], [1], [], [])
        assert (result["newer"], result["loaded"]) == ([2], [{"a": 2}])

    if environ.scheme == "gs":
        read_by_orbax(environ, f"{environ.bucket}/orbaxs_names_save_to_a_bucket/standard", monkeypatch)


def read_by_orbax(server: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what Orbax, in one process, finds there with what two processes saved."""
    pytest.importorskip("gcsfs", reason="by it Orbax reads gs://: pip install gcsfs")
    for name, value in server.environ_of_orbax().items():
        monkeypatch.setenv(name, value)

    command = [sys.executable, "-c", ORBAX, server.json_endpoint, url]
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=100, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-3000:]
