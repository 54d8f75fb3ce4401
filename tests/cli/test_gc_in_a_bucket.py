"""`penstock gc` on a bucket: what an ended saver left there has no name of its own."""

from __future__ import annotations

import json

import pytest
from tests.handlers.stores.buckets.bucket_rig import Bucket
from tests.object_server import CREDENTIALS, object_server

from penstock.cli import main
from penstock.handlers.stores.buckets import S3Options, connect


def test_what_an_ended_saver_left_is_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = pytest.importorskip("obstore.store", reason="needs obstore")
    with object_server() as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)

        bucket = Bucket(connect("bucket", S3Options())(stores))
        builds = bucket.builds()
        builds.create(builds.begin("run/7", "place", None), "run/7/file", b"content")
        assert main(["gc", "s3://bucket/run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["left"] == [{"path": "s3://bucket/run/7", "state": "kept"}]
        bucket.end_owner("run/7.penstock-saving")
        assert main(["gc", "s3://bucket/run"]) == 0
        assert "s3://bucket/run/7" in capsys.readouterr().out
        assert bucket.objects_there() == []
        assert main(["gc", "s3://bucket/run", "--dry-run"]) != 0
        assert "cannot say" in capsys.readouterr().err
