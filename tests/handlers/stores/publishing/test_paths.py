"""What callers may pass as a path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import PathError
from penstock.handlers.stores.publishing.paths import absolute_path, path_or_url, root_of, scheme_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("s3://bucket//run/./step", "s3://bucket/run/step"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("file:///run/a%20b", "/run/a b"),
        ("foo:bar", os.path.abspath("foo:bar")),
    ],
)
def test_paths_and_urls(given: str | Path, expected: str) -> None:
    assert path_or_url(given) == path_or_url(expected) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket/../run", r"has '\.\.' in it"),
        ("hdfs://bucket/run", "names a hdfs:// store"),
        ("s3://bucket/run?endpoint=h&secret=SECRET", r"has a '\?' in it"),
        ("s3://bucket/run#SECRET", "has a '#' in it"),
        ("s3://key:SECRET@bucket/run", "has a '@' in it"),
        ("hdfs://key:SECRET@bucket/run", "names a hdfs:// store"),
    ],
)
def test_what_is_refused_and_never_repeats_a_secret(given: str, said: str) -> None:
    with pytest.raises(PathError, match=said) as caught:
        path_or_url(given)

    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in caught.value.path


def test_where_only_local_paths_are_supported_a_bucket_is_refused() -> None:
    with pytest.raises(PathError, match="only local paths are supported yet"):
        absolute_path("s3://bucket/run")


def test_the_bucket_of_a_path() -> None:
    assert scheme_of("s3://bucket/run") == "s3"
    assert root_of("s3://bucket/run") == root_of("s3://bucket") == "s3://bucket"
    assert scheme_of("/run/s3://bucket") is None
    assert scheme_of("/run") is None
