"""jax.distributed's coordination service, the real one, with all its clients in this process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax._src import lib

from penstock.handlers.coordinators import JaxKeyValues

native: Any = getattr(lib, "_jax")  # noqa: B009 - private, and untyped


@contextlib.contextmanager
def real_service(count: int, *, init_timeout: int = 30) -> Generator[list[JaxKeyValues]]:
    """Start the service for `count` processes, and connect a client for each."""
    with socket.socket() as held:  # until the service has the port, so that nobody else gets it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        service = native.get_distributed_runtime_service(address, count)

    clients = [
        native.get_distributed_runtime_client(
            address, index, init_timeout=init_timeout, shutdown_on_destruction=False
        )
        for index in range(count)
    ]
    with contextlib.ExitStack() as connecting:
        for client in clients:
            connecting.callback(client.shutdown)
        _all_at_once([client.connect for client in clients])
        yield [JaxKeyValues(client) for client in clients]
        connecting.pop_all()

    _all_at_once([client.shutdown for client in clients])
    service.shutdown()


def _all_at_once(calls: list[Any]) -> None:
    """Each of them waits for all the others."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for future in [threads.submit(call) for call in calls]:
            future.result()
