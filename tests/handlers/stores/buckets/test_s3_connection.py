"""What S3 is told: from the options, else from the environment, and no secret among it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from penstock.handlers.stores.buckets.s3_connection import connect_s3
from penstock.kernel.config.bucket_options import BucketOptions
from penstock.kernel.config.config import Config
from penstock.kernel.errors import ConfigError


class Recorder:
    def __init__(self) -> None:
        self.bucket = ""
        self.told: dict[str, Any] = {}

    def S3Store(self, bucket: str, **told: Any) -> Recorder:  # obstore's name
        self.bucket, self.told = bucket, told
        return self


def told(options: BucketOptions, **environ: str) -> dict[str, Any]:
    found: Recorder = connect_s3("bucket", options, environ=environ)(Recorder())
    assert found.bucket == "bucket"
    return found.told


def test_the_environment_of_other_tools_is_enough() -> None:
    found = told(
        BucketOptions(),
        AWS_ENDPOINT_URL="http://127.0.0.1:9000",
        AWS_DEFAULT_REGION="eu-central-1",
        AWS_SECRET_ACCESS_KEY="hidden",
    )
    assert found["config"] == {
        "endpoint": "http://127.0.0.1:9000",
        "region": "eu-central-1",
        "virtual_hosted_style_request": False,
        "unsigned_payload": False,
        "checksum_algorithm": "crc64nvme",
    }
    assert found["client_options"]["allow_http"] is True
    assert "hidden" not in repr(found)


def test_of_amazon_nothing_need_be_said() -> None:
    found = told(BucketOptions())
    assert found["config"] == {
        "virtual_hosted_style_request": True,
        "unsigned_payload": True,
        "checksum_algorithm": "crc64nvme",
    }
    assert found["client_options"]["allow_http"] is False


def test_options_come_before_the_environment() -> None:
    config = Config.load(
        environ={"PENSTOCK_STORE__S3__RETRIES": "3"},
        arguments={"store": {"s3": {"endpoint": "https://s3.example", "request_s": 7.5, "checksum": "none"}}},
    )
    found = told(config.store.s3, AWS_ENDPOINT_URL="http://elsewhere", AWS_REGION="r")
    assert found["config"]["endpoint"] == "https://s3.example"
    assert "checksum_algorithm" not in found["config"]
    assert found["client_options"]["timeout"] == timedelta(seconds=7.5)
    assert found["retry_config"]["max_retries"] == 3


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"store\.s3\.secret"):
        Config.load(environ={}, arguments={"store": {"s3": {"secret": "x"}}})
