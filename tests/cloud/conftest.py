"""Real servers, each started once. Only `make cloud` runs what is here."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.cloud.servers import Server, moto, program, seaweedfs

ASKED = bool(os.environ.get("TESTS_OF_SERVERS"))
SERVERS = {"seaweedfs": ("weed", seaweedfs), "moto": ("moto_server", moto)}

collect_ignore_glob = [] if ASKED else ["test_*.py"]


@pytest.fixture(scope="session", params=list(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A running server with an empty bucket."""
    command, start = SERVERS[request.param]
    if program(command) is None:
        pytest.skip(f"{command} is not installed")

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
