"""Real processes that save to a bucket together. A quick test of it has tasks: tests/checkpointer."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import jax
import pytest
from tests.object_server import BUCKET, CREDENTIALS, ObjectServer, object_server
from tests.processes.bucket_conversions import a_killed_conversion_is_made_again, conversions_agree
from tests.processes.launcher import run_job
from tests.processes.trees import values

import penstock.sync

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(118)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[ObjectServer]:
    """A server that outlives the processes."""
    pytest.importorskip("obstore", reason="needs obstore")
    with object_server() as found:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": found.endpoint}.items():
            monkeypatch.setenv(name, value)
        yield found


def test_two_processes_save_restore_and_keep_steps(server: ObjectServer, tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, ["saves_to_a_bucket", "a_bucket_keeps_steps"])
    results = done.results("saves_to_a_bucket")
    on_hosts = 48 + 8 + 12 + 8 + 8 * 8
    assert sum(result["nbytes"] for result in results) == on_hosts + sum(
        each.nbytes for each in jax.tree.leaves(values())
    )
    assert [result["again"] for result in results] == ["DestinationExistsError", "PeerFailedError"]
    for result in results:
        assert (result["differs"], result["intact"], result["left"]) == ([], [True, True], [])
        assert result["kept"] > 0

    for result in done.results("a_bucket_keeps_steps"):
        assert result == {"steps": [2, 3], "differs": []}


def test_who_is_killed_is_named_and_the_next_save_takes_over(server: ObjectServer, tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, ["one_dies_saving_to_a_bucket"])
    result = done.result("one_dies_saving_to_a_bucket", 0)
    assert result == {"told": ["PeerSilentError", [1], "write"], "differs": []}
    url = f"s3://{BUCKET}/killed"
    assert list(server.backend.names("killed/2")) == ["killed/2.penstock-saving"]
    penstock.sync.save(f"{url}/2", {"x": 1})
    assert penstock.sync.restore(f"{url}/2")["x"] == 1
    assert penstock.sync.verify(f"{url}/1").intact


def test_a_stopped_primary_publishes_nothing_when_it_wakes(server: ObjectServer, tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, ["the_primary_stops_saving_to_a_bucket"])
    first, second = done.results("the_primary_stops_saving_to_a_bucket")
    assert second["told"][:2] == ["PeerSilentError", [0]]
    assert second["there"] is None
    assert first["told"][0] == "PeerSilentError"
    path = f"s3://{BUCKET}/stopped/1"
    penstock.sync.save(path, {"x": 1})
    assert penstock.sync.restore(path)["x"] == 1


@pytest.mark.usefixtures("server")
def test_two_processes_convert_from_a_bucket_and_to_one(tmp_path: Path) -> None:
    conversions_agree(tmp_path)


def test_a_conversion_of_which_one_is_killed_is_made_again(server: ObjectServer, tmp_path: Path) -> None:
    a_killed_conversion_is_made_again(tmp_path)
    assert not [name for name in server.backend.names("converted/killed") if "penstock-saving" in name]
