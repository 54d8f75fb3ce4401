"""Holds where the file system has no locks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.handlers.stores.name_claims import NameClaim
from penstock.kernel.errors import InUseError

CLAIM = ".a.penstock-claim"


def text(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / CLAIM).read_text())
    return found


def test_a_name_is_claimed_by_one_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    first = NameClaim(path)
    assert NameClaim.is_made(path)
    with pytest.raises(InUseError, match=f"process {os.getpid()} of .*remove .*{CLAIM}") as caught:
        NameClaim(path)
    assert caught.value.errno == errno.EBUSY

    first.release()
    first.release()
    second = NameClaim(path)
    first.release()  # gives up nothing of the second one
    assert NameClaim.is_made(path)
    second.release()
    assert os.listdir(tmp_path) == []


def test_the_claim_of_a_process_that_was_killed_is_broken(tmp_path: Path) -> None:
    program = (
        "import os, sys; from penstock.handlers.stores.name_claims import NameClaim\n"
        f"NameClaim({str(tmp_path / 'a')!r}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert os.listdir(tmp_path) == [CLAIM]

    NameClaim(str(tmp_path / "a")).release()
    assert os.listdir(tmp_path) == []


def _of_another_host(about: dict[str, object]) -> None:
    about["host"] = "elsewhere"


def _of_an_earlier_process(about: dict[str, object]) -> None:
    about["began"] = "1"


def _of_an_earlier_start(about: dict[str, object]) -> None:
    about["boot"] = "before"


@pytest.mark.parametrize(
    ("change", "is_broken"),
    [(_of_another_host, False), (_of_an_earlier_process, True), (_of_an_earlier_start, True)],
)
def test_only_a_claim_of_a_process_that_has_ended_is_broken(
    tmp_path: Path, change: Callable[[dict[str, object]], None], is_broken: bool
) -> None:
    path = str(tmp_path / "a")
    claim = NameClaim(path)
    about = text(tmp_path)
    change(about)
    (tmp_path / CLAIM).write_text(json.dumps(about))
    if is_broken:
        NameClaim(path).release()
        assert os.listdir(tmp_path) == []
    else:
        with pytest.raises(InUseError, match="of elsewhere"):
            NameClaim(path)

    claim.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff"])
def test_a_claim_that_cannot_be_read_holds(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CLAIM).write_bytes(content)
    with pytest.raises(InUseError, match="an unknown process"):
        NameClaim(str(tmp_path / "a"))


def test_while_a_claim_is_broken_nobody_else_breaks_it(tmp_path: Path) -> None:
    claim = NameClaim(str(tmp_path / "a"))
    about = text(tmp_path) | {"began": "1"}
    (tmp_path / CLAIM).write_text(json.dumps(about))
    (tmp_path / f"{CLAIM}-{about['id']}").touch()
    with pytest.raises(InUseError, match="which another process removes"):
        NameClaim(str(tmp_path / "a"))

    claim.release()
