"""Starts servers of others, waits until they answer, and removes what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

READY_S = 30.0
N_ATTEMPTS = 3
N_PORTS = 5
SECOND_PORT = 10_000
"""How much higher the port is by which each part of SeaweedFS speaks to the others."""


class DidNotStartError(RuntimeError):
    """A server of somebody else's did not come up."""


def free_port() -> int:
    """Return a port that was free just now."""
    return free_ports(1)[0]


def free_ports(n: int) -> list[int]:
    """Return ports that were free just now, as were those that SeaweedFS takes beside them."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < n:
            try:
                port: int = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                held.enter_context(socket.create_server(("127.0.0.1", port + SECOND_PORT)))
            except (OSError, OverflowError):  # taken, or above the last port
                continue

            found.append(port)

    return found


@contextmanager
def running_on_free_ports(
    command_of: Callable[[Sequence[int]], list[str]], folder: Path, environ: Mapping[str, str]
) -> Generator[Sequence[int]]:
    """Run SeaweedFS on ports that were free just now, and on others if somebody took one before it did."""
    with ExitStack() as stack:
        for attempt in range(1, N_ATTEMPTS + 1):
            ports = free_ports(N_PORTS)
            stack.callback(remove_sockets, ports)
            try:
                stack.enter_context(
                    running(command_of(ports), f"http://127.0.0.1:{ports[0]}", folder, environ)
                )
            except DidNotStartError:
                if attempt == N_ATTEMPTS:
                    raise
            else:
                yield ports
                return


def remove_sockets(ports: Sequence[int]) -> None:
    """Remove the sockets of SeaweedFS, which it puts into /tmp and nowhere else, and leaves there."""
    for port in (*ports, *[port + SECOND_PORT for port in ports]):
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink(missing_ok=True)


@contextmanager
def running(
    command: list[str], url: str, folder: Path, environ: Mapping[str, str], keep: int | None = None
) -> Generator[None]:
    """Run a server until the block ends; it is there once it answers anything at `url`.

    Args:
        command: What starts it.
        url: What it is asked.
        folder: Where it works, and puts what is temporary.
        environ: Variables for it; SeaweedFS takes from them whom it serves.
        keep: A file descriptor that it inherits.

    Raises:
        DidNotStartError: If it has ended, or does not answer within 30 s.
    """
    # A server must not outlive tests that were killed.
    bound = [setpriv, "--pdeathsig", "KILL"] if (setpriv := shutil.which("setpriv")) else []
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*bound, *command],
            cwd=folder,
            env={**os.environ, **environ, "TMPDIR": str(folder)},
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=() if keep is None else (keep,),
        )
        try:
            wait_for(url, process, folder / "log")
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once something answers. Looks every 0.1 s: a server says by nothing else that it is there."""
    until = monotonic() + READY_S
    while monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError as answer:
            answer.close()
            if answer.code < 500:
                return
        except OSError:
            pass
        else:
            return

        sleep(0.1)

    how = "does not answer" if process.returncode is None else f"ended with {process.returncode}"
    raise DidNotStartError(f"it {how}: {log.read_text(errors='replace')[-500:].strip()}")
