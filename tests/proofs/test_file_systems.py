"""A few courses of `make file-systems`, where a user namespace may mount."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COURSES = ("overwrite", "link", "step")


@pytest.mark.process
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["overlay", pytest.param("tmpfs", marks=pytest.mark.slow)])
def test_saves_links_overwrites_and_deletions_on_a_mounted_file_system(kind: str) -> None:
    probe = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/tmp"]
    try:
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system lets nobody mount in a user namespace: {error}")

    command = [sys.executable, "-m", "tests.proofs.file_systems", "--on", kind, "--layouts", "ocdbt"]
    done = subprocess.run(
        [*command, "--courses", *COURSES], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert f"{kind}: 3 courses" in done.stdout
