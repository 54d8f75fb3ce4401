"""`penstock convert --distributed`, run in two processes that find each other by jax's service."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock

pytestmark = [pytest.mark.process]


@pytest.mark.timeout(240)
def test_two_commands_write_one_file_that_is_intact(tmp_path: Path) -> None:
    tree = {f"l{at}": np.full((600, 700), at, np.float32) for at in range(5)}
    penstock.sync.save(tmp_path / "source", tree)
    target = tmp_path / "made.safetensors"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

    command = [sys.executable, "-m", "penstock.cli", "convert", str(tmp_path / "source"), str(target)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [*command, "--distributed", f"127.0.0.1:{port},{index},2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    said = [process.communicate()[0] for process in started]

    assert [process.returncode for process in started] == [0, 0], said
    assert all(f"by process {index} of 2" in text for index, text in enumerate(said)), said
    assert penstock.sync.verify(target).intact
    found = penstock.sync.restore(target)
    for name, value in tree.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_place_that_says_no_number_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "convert", str(tmp_path), str(tmp_path / "made")]
    done = subprocess.run([*command, "--distributed", "127.0.0.1:1,0"], capture_output=True, text=True)

    assert done.returncode == 1
    assert "not of the form HOST:PORT,INDEX,COUNT" in done.stderr
