"""`penstock ls` on a bucket whose server still lists what was deleted; `penstock doctor` on any."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.object_server import CREDENTIALS, InMemory, object_server

import penstock.sync
from penstock.cli import main


class ListsDeleted(InMemory):
    """Lists a step from which the last object has gone, as SeaweedFS does for a while."""

    def names(self, prefix: str) -> Mapping[str, int]:
        gone = {"run/1/commit_success.txt": 1} if prefix == "run/" else {}
        return gone | dict(super().names(prefix))


def test_a_step_that_is_gone_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    with object_server(ListsDeleted()) as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)

        for step in (2, 3):
            penstock.sync.save(f"s3://bucket/run/{step}", {"x": step})

        server.backend.put("run/3/_CHECKPOINT_METADATA", b"no JSON")
        assert main(["ls", "s3://bucket/run"]) == 0
        told = [line.split("\t")[:2] for line in capsys.readouterr().out.splitlines()]
        assert told == [["2", "finished"], ["3", "damaged"]]


def test_doctor_says_if_a_bucket_can_be_written_and_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    backend = InMemory()
    with object_server(backend) as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)

        assert main(["doctor", "s3://bucket/run"]) == 0
        assert "write and read\tyes\tok" in capsys.readouterr().out
        assert dict(backend.names("")) == {}

        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
        monkeypatch.setenv("PENSTOCK_STORE__S3__RETRY_S", "0.1")
        assert main(["doctor", "s3://bucket/run"]) == 1
        assert "write and read\tno\tmissing\t" in capsys.readouterr().out
