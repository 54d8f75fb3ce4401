"""The crc32c of parts is that of the whole."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.handlers.formats.region_reads import combined_crc32c


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_any_parts(parts: list[bytes]) -> None:
    assert combined_crc32c([(crc32c(part), len(part)) for part in parts]) == crc32c(b"".join(parts))


def test_long_parts() -> None:
    first, second = bytes(5_000_000), b"\x5a" * 3_000_001

    assert combined_crc32c([(crc32c(first), len(first)), (crc32c(second), len(second))]) == crc32c(
        first + second
    )
