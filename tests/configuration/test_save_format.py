"""What can be asked for of the format, by code, TOML and environment, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import SaveArgs, SaveFormat
from penstock.config import Config
from penstock.errors import ConfigError, SpecError


@pytest.mark.parametrize(
    ("codec", "leaf_codec"),
    [("none", None), ("auto", "auto"), ("zstd", "zstd:1"), ("zstd:1", "zstd:1"), ("zstd:22", "zstd:22")],
)
def test_codecs(codec: str, leaf_codec: str | None) -> None:
    assert SaveFormat(codec=codec).leaf_codec == leaf_codec


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("codec", value)
            for value in ("", "gzip", "zstd:", "zstd:0", "zstd:23", "zstd:01", "zstd:1 ", 5, None)
        ],
        *[("zarr", value) for value in (1, 4, "2", None, True, 2.5)],
        *[("ocdbt", value) for value in ("no", 1, None)],
        *[("replica_parallel", value) for value in ("no", 1)],
        *[("rich_types", value) for value in ("no", 1)],
        *[("chunk_byte_size", value) for value in (0, -1, "1MiB", 1.5, True)],
        *[("ocdbt_target_data_file_size", value) for value in (-1, "1MiB", 1.5, False)],
        *[("replica_parallel_max_replicas", value) for value in (0, -1, "2", 1.5)],
        *[("replica_parallel_min_bytes", value) for value in (-1, "1MiB", 1.5)],
    ],
)
def test_what_is_no_format_is_refused_by_the_name_of_the_option(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SaveFormat(**{name: value})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    assert caught.value.key == f"format.{name}"
    assert repr(value) in caught.value.problem


def test_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(
        """
        [format]
        ocdbt = false
        zarr = 3
        codec = "zstd:5"
        chunk_byte_size = "1MiB"
        ocdbt_target_data_file_size = "2GiB"
        replica_parallel = true
        replica_parallel_min_bytes = "4KiB"
        rich_types = true
        """
    )

    found = Config.load(path, environ={}).format

    assert found == SaveFormat(False, 3, "zstd:5", 2**20, 2**31, True, 4096, True)


def test_from_the_environment() -> None:
    environ = {
        "PENSTOCK_FORMAT__OCDBT": "no",
        "PENSTOCK_FORMAT__ZARR": "3",
        "PENSTOCK_FORMAT__CODEC": "auto",
        "PENSTOCK_FORMAT__CHUNK_BYTE_SIZE": "1KiB",
    }
    assert Config.load(environ=environ).format == SaveFormat(False, 3, "auto", 1024)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('codec = "gzip"', "codec"),
        ("codec = 1", "codec"),
        ("zarr = 4", "zarr"),
        ('zarr = "3"', "zarr"),
        ("ocdbt = 1", "ocdbt"),
        ("chunk_byte_size = 0", "chunk_byte_size"),
        ('chunk_byte_size = "a lot"', "chunk_byte_size"),
        ("ocdbt_target_data_file_size = -1", "ocdbt_target_data_file_size"),
        ("codecs = 1", "codecs"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_file_that_says_it(tmp_path: Path, line: str, key: str) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(f"[format]\n{line}\n")

    with pytest.raises(ConfigError) as caught:
        Config.load(path, environ={})

    assert (caught.value.key, caught.value.source) == (f"format.{key}", str(path))


@pytest.mark.parametrize(
    ("name", "value"), [("ZARR", "4"), ("ZARR", "two"), ("CODEC", "gzip"), ("OCDBT", "2")]
)
def test_what_does_not_fit_is_refused_with_the_variable_that_says_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(environ={f"PENSTOCK_FORMAT__{name}": value})

    assert caught.value.source == f"PENSTOCK_FORMAT__{name}"


def test_axes_may_be_a_list() -> None:
    assert SaveArgs(shard_axes=[2, 0]) == SaveArgs(shard_axes=(2, 0))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "options",
    [
        *[{"chunk_byte_size": value} for value in (0, -1, "1MiB", 1.5, True)],
        *[{"shard_axes": value} for value in (3, "0", (-1,), ("0",), (0.0,), (True,), None, {0})],
    ],
)
def test_args_that_no_leaf_could_have_are_refused_where_they_are_made(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        SaveArgs(**options)
