"""Which process it is, and when it is known to have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.handlers.stores.publishing.process_identity import ProcessIdentity

HERE = "pid:[4026531836]"
ME = ProcessIdentity("host", "machine", "boot", HERE, os.getpid(), ProcessIdentity.mine().began)
UNUSED = 2**30  # no process has this number


def test_this_process_is_at_work() -> None:
    mine = ProcessIdentity.mine()
    assert mine.pid == os.getpid()
    assert not mine.has_ended(mine)
    assert ProcessIdentity.decode(mine.encode(more="of it")) == mine


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing says which machine it is")
def test_a_process_has_ended_also_while_its_parent_did_not_ask_for_its_status() -> None:
    program = (
        "from penstock.handlers.stores.publishing.process_identity import ProcessIdentity\n"
        "print(ProcessIdentity.mine().encode().decode(), flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        other = ProcessIdentity.decode(child.stdout.readline())
        assert other is not None
        assert not other.has_ended(ProcessIdentity.mine())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and can still be seen
        assert other.has_ended(ProcessIdentity.mine())

    assert other.has_ended(ProcessIdentity.mine())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing says which machine it is")
@pytest.mark.parametrize(
    ("other", "has_ended"),
    [
        (replace(ME, pid=UNUSED), True),
        (replace(ME, began="1"), True),  # its number was used again
        (replace(ME, began=""), False),
        (replace(ME, boot="before"), True),
        (replace(ME, boot="before", machine="other"), False),
        (replace(ME, boot="before", machine=""), False),
        (replace(ME, boot="before", host="other"), False),
        (replace(ME, boot="before", namespace="pid:[1]"), False),
        (replace(ME, boot="", pid=UNUSED), False),
        (replace(ME, namespace="pid:[1]", pid=UNUSED), False),  # of another container
        (replace(ME, namespace="", pid=UNUSED), False),
    ],
)
def test_a_process_has_ended_only_if_that_is_known(other: ProcessIdentity, has_ended: bool) -> None:
    assert other.has_ended(ME) is has_ended


def test_where_nothing_is_known_of_the_machine_nobody_has_ended() -> None:
    assert not replace(ME, pid=UNUSED).has_ended(replace(ME, boot=""))
    assert not replace(ME, boot="before", machine="").has_ended(replace(ME, machine=""))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff", ME.encode(host=1)])  # type: ignore[arg-type]
def test_what_is_no_identity_is_none(data: bytes) -> None:
    assert ProcessIdentity.decode(data) is None
