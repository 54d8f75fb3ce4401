"""A trace is read as the calls were made, also where strace wrote a call in two halves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.proofs.system_calls import SystemCalls

from penstock.testing.crash_store import RecordedDisk


def coded(text: str) -> str:
    """Text as strace writes it with `-xx`."""
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(text))


WRITE = 'pwritev2(3<{file}>, [{{iov_base="{first}", iov_len=3}}], 1, 0, 0'
LATER = 'pwritev2(3<{file}>, [{{iov_base="{last}", iov_len=4}}], 1, 3, 0'
WHOLE = [f"7 {WRITE}) = 3", f"8 {LATER}) = 4"]
IN_HALVES = [
    f"7 {WRITE} <unfinished ...>",
    f"8 {LATER} <unfinished ...>",
    "7 <... pwritev2 resumed>)           = 3",
    "8 <... pwritev2 resumed>)           = 4",
]


@pytest.mark.parametrize("writes", [WHOLE, IN_HALVES], ids=["whole", "in halves"])
def test_what_two_threads_write_at_once_lies_where_each_wrote_it(tmp_path: Path, writes: list[str]) -> None:
    lines = [
        '7 openat(AT_FDCWD</>, "{file}", O_WRONLY|O_CREAT, 0666) = 3<{file}>',
        *writes,
        "7 fsync(3<{file}>) = 0",
    ]
    known = {"file": coded("/traced/x"), "first": coded("abc"), "last": coded("defg")}
    disk = RecordedDisk(tmp_path)
    calls = SystemCalls(Path("/traced"))
    calls.begin(disk, tmp_path)

    assert list(calls.marks_in(line.format(**known) for line in lines)) == []
    file = disk.find(str(tmp_path / "x"))
    assert file is not None
    assert disk.size(file) == 7
    disk.record(disk.synced_names(str(tmp_path)))
    disk.least().write(tmp_path / "after")
    assert (tmp_path / "after" / "x").read_bytes() == b"abcdefg"
