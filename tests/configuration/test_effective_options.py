from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.option_reference import effective_options, masked


def test_every_option_has_its_value_and_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("[memory]\nlimit_bytes = '2GiB'\n[save.mine]\na_list = [1, 'x']\n")
    environ = {"PENSTOCK_STORE__IO": "direct", "PENSTOCK_SAVE__WRITE__CONCURRENCY": "3"}

    found = {option.key: (option.value, option.source) for option in effective_options(path, environ=environ)}

    assert found["memory.limit_bytes"] == ('"2GiB"', str(path))
    assert found["store.io"] == ('"direct"', "PENSTOCK_STORE__IO")
    assert found["save.write.concurrency"] == ('"3"', "PENSTOCK_SAVE__WRITE__CONCURRENCY")
    assert found["save.mine.a_list"] == ('[1, "x"]', str(path))
    assert found["format.codec"] == ('"none"', "default")
    assert found["restore.read.verify"] == ("true", "default")


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("save.encrypt.key", '"abc"', "********"),
        ("save.encrypt.api_key", '"abc"', "********"),
        ("save.encrypt.secret_text", '"abc"', "********"),
        ("save.upload.Password", '"abc"', "********"),
        ("save.upload.token", "(none)", "(none)"),
        ("job.key_prefix", '"abc"', '"abc"'),
        ("store.s3.endpoint", '"https://me:pass@host/x"', '"https://********@host/x"'),
        ("store.az.endpoint", '"https://host/?sv=1&sig=abc"', '"https://host/?sv=1&sig=********"'),
    ],
)
def test_secrets_are_masked(key: str, value: str, shown: str) -> None:
    assert masked(key, value) == shown


def test_a_secret_of_a_stage_is_masked_wherever_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("[save.encrypt]\nkey = 'hunter2'\n")
    environ = {"PENSTOCK_SAVE__ENCRYPT__TOKEN": "hunter2"}

    assert "hunter2" not in str(effective_options(path, environ=environ))
