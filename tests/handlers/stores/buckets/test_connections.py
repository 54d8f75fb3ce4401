"""What obstore is told: from the options, else from the environment, and no secret among it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.handlers.stores.buckets.bucket_options import AzOptions, BucketOptions, GsOptions, S3Options
from penstock.handlers.stores.buckets.connections import connect, tensorstore_spec


class Recorder:
    def __init__(self) -> None:
        self.bucket = ""
        self.told: dict[str, Any] = {}

    def _make(self, bucket: str, **told: Any) -> Recorder:
        self.bucket, self.told = bucket, told
        return self

    S3Store = GCSStore = AzureStore = _make  # obstore's names


def told(options: BucketOptions, **environ: str) -> dict[str, Any]:
    found: Recorder = connect("bucket", options, environ=environ)(Recorder())
    assert found.bucket == "bucket"
    return found.told


def test_the_environment_of_other_tools_is_enough() -> None:
    found = told(
        S3Options(),
        AWS_ENDPOINT_URL="http://127.0.0.1:9000",
        AWS_DEFAULT_REGION="eu-central-1",
        AWS_SECRET_ACCESS_KEY="hidden",
    )
    assert found["config"] == {
        "endpoint": "http://127.0.0.1:9000",
        "region": "eu-central-1",
        "virtual_hosted_style_request": False,
        "unsigned_payload": False,
        "checksum_algorithm": "sha256",
        "copy_if_not_exists": "multipart",
    }
    assert found["client_options"]["allow_http"] is True
    assert "hidden" not in repr(found)


def test_of_amazon_nothing_need_be_said() -> None:
    found = told(S3Options())
    assert found["config"] == {
        "virtual_hosted_style_request": True,
        "unsigned_payload": True,
        "checksum_algorithm": "crc64nvme",
        "copy_if_not_exists": "multipart",
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
    assert found["retry_config"]["max_retries"] == 0, "whoever uses the client repeats requests"
    made = connect("bucket", config.store.s3, environ={})
    assert made.policy.most == 3
    assert made.patient(Recorder()).told["retry_config"]["max_retries"] == 3


def test_time_bounds_repetitions_unless_a_number_is_given() -> None:
    made = connect("bucket", S3Options(), environ={})
    assert (made.policy.total_s, made.policy.most) == (120.0, None)
    patient: Recorder = made.patient(Recorder())
    assert patient.told["retry_config"]["max_retries"] == 1000
    assert patient.told["retry_config"]["retry_timeout"] == timedelta(seconds=120)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"store\.s3\.secret"):
        Config.load(environ={}, arguments={"store": {"s3": {"secret": "x"}}})


def test_google_is_found_and_no_token_goes_over_an_open_line() -> None:
    assert told(GsOptions())["config"] == {}
    emulator = told(GsOptions(), STORAGE_EMULATOR_HOST="127.0.0.1:9")
    assert emulator["config"] == {"base_url": "http://127.0.0.1:9", "bearer_token": "none"}
    assert emulator["client_options"]["allow_http"] is True
    named = told(GsOptions(endpoint="https://g.example", billed_project="p"), GOOGLE_BASE_URL="http://e")
    assert named["config"] == {"base_url": "https://g.example"}
    assert named["client_options"]["default_headers"] == {"x-goog-user-project": "p"}


def test_azure_needs_an_account() -> None:
    assert told(AzOptions(account="a"))["config"] == {"account_name": "a"}
    found = told(AzOptions(), AZURE_STORAGE_ACCOUNT_NAME="b", AZURE_STORAGE_ENDPOINT="http://127.0.0.1:9/b")
    assert found["config"] == {"endpoint": "http://127.0.0.1:9/b", "account_name": "b"}
    with pytest.raises(ConfigError, match=r"store\.az\.account: is not known"):
        connect("bucket", AzOptions(), environ={})


def test_each_kind_of_bucket_has_options_of_its_own() -> None:
    config = Config.load(
        environ={"PENSTOCK_STORE__GS__CONNECT_S": "2"},
        arguments={"store": {"gs": {"progress_s": "3s", "retry_s": 9}, "az": {"account": "a"}}},
    )
    found = told(config.store.gs)
    assert found["client_options"]["connect_timeout"] == timedelta(seconds=2)
    assert found["client_options"]["read_timeout"] == timedelta(seconds=3)
    assert found["retry_config"]["retry_timeout"] == timedelta(seconds=9)
    assert config.store.of_scheme("az") == AzOptions(account="a")
    assert config.store.of_scheme("s3") == S3Options()


def test_tensorstore_is_told_the_same_place_and_no_secret() -> None:
    environ = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_REGION": "r"}
    assert tensorstore_spec("b", S3Options(endpoint="http://e"), environ) == {
        "driver": "s3",
        "bucket": "b",
        "endpoint": "http://e",
        "aws_region": "r",
        "aws_credentials": {"type": "environment"},
    }
    assert tensorstore_spec("b", GsOptions(), {}) == {"driver": "gcs", "bucket": "b"}
    assert tensorstore_spec("b", AzOptions(account="a"), {}) is None
