"""A saver is stopped before each of its requests, another takes its path over and saves, and it wakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cloud.servers import Server

import penstock

pytestmark = pytest.mark.timeout(280)

MOST = 40


def wait_stopped(process: subprocess.Popen[str]) -> bool:
    """Return once the process is stopped; False if it ended its save without being stopped."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    return os.WIFSTOPPED(status)


def whole(tree: dict[str, Any]) -> str:
    """Return whose a tree is; it must be of one saver alone."""
    values = {float(value) for name in ("a", "b") for value in tree[name]}
    assert values == {{"paused": 0.0, "taker": 1.0}[tree["who"]]}, "a mixture"
    return str(tree["who"])


def test_a_saver_that_wakes_after_a_takeover_mixes_nothing(environ: Server) -> None:
    url, outcomes = environ.url(), list[tuple[str, str]]()
    saver = subprocess.Popen(
        [sys.executable, "-m", "tests.cloud.paused_saver", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environ.environ()},
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert saver.stdin is not None
    assert saver.stdout is not None
    try:
        for number in range(1, MOST):
            saver.stdin.write(f"{number}\n")
            saver.stdin.flush()
            assert wait_stopped(saver), "it is stopped before each request that it makes"
            path = f"{url}/{number}"
            taken = save_over(path)
            seen = whole(penstock.sync.restore(path))
            saver.send_signal(signal.SIGCONT)
            said, requests = saver.stdout.readline().split()
            outcomes.append((taken, said))
            assert whole(penstock.sync.restore(path)) == seen, "what was there did not change"
            report = penstock.sync.verify(path)  # a file of data that the first one put too late lies there
            assert not [found for found in report.findings if found.kind != "unchecked"]
            assert (taken == "saved") == (seen == "taker")
            assert not (taken == "saved" and said == "saved"), "both were told that they won"
            if taken != "saved" and int(requests) == number:
                break  # it was stopped before its last request
    finally:
        saver.kill()
        saver.wait()
        saver.stdin.close()
        saver.stdout.close()

    assert [said for _, said in outcomes].count("saved") >= 2, outcomes
    assert [taken for taken, _ in outcomes].count("saved") >= 5, outcomes


def save_over(path: str) -> str:
    """Take a path over from whoever claims it, and save there; return how that ended."""
    with suppress(penstock.errors.NotACheckpointError):
        penstock.sync.gc(path, older_than_s=0.0)

    try:
        penstock.sync.save(path, {"who": "taker", "a": np.ones(1000), "b": np.ones(1000)})
    except penstock.PenstockError as error:
        return type(error).__name__

    return "saved"
