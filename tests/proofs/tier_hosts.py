"""What jobs of `tests.proofs.tiers` run on: hosts with keeper, disk and network, a bucket, a service.

Where this user may make network namespaces, each host has one, with a name and an address, and one cable to a
switch, which can be pulled. Its disk is a file system in memory of its own, which can be full or refuse to
write. Where that is not allowed, hosts are folders, and cables and disks have no faults.

The bucket is a real server, behind a relay that refuses, hangs or is slow when asked to. The service by which
the processes of a job agree is a process, too: this one runs no thread, so that it can fork.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.managers import BaseManager
from pathlib import Path
from threading import Thread
from typing import Final, Literal, cast

import anyio
from tests.cloud.server_processes import running_on_free_ports
from tests.cloud.servers import ENVIRONMENT, Server, program, seaweedfs_command, wait_for_bucket
from tests.proofs.crash_loop import fork
from tests.proofs.forked_keepers import run_forked_keeper

from penstock.keeper.process import arguments
from penstock.kernel.protocols.coordinator import KeyValues
from penstock.testing import MemoryKeyValues

SAYS_S: Final = 180.0
"""Seconds in which a training must say something. Who says nothing hangs."""

DISK_BYTES: Final = 64 * 2**20
_NET, _NAME, _MOUNTS = 0x40000000, 0x04000000, 0x00020000
_PARENT_ENDS: Final = 1
_BIND, _PRIVATE = 0x1000, 0x44000  # the second one for all below
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
Trouble = Literal["none", "refuses", "hangs", "slow"]
TROUBLES: Final[Sequence[Trouble]] = ("none", "refuses", "hangs", "slow")
SLOW_BYTES_S: Final = 200_000


def _call(name: str, *given: object) -> None:
    if getattr(_LIBC, name)(*given):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def end_with_parent() -> None:
    """Have the system kill this process when the one ends that made it."""
    _call("prctl", _PARENT_ENDS, signal.SIGKILL)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def has_namespaces() -> bool:
    """True if this user may make networks and mount file systems."""
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "v0", "type", "veth"],
        check=False,
        capture_output=True,
    )
    return tried.returncode == 0 and os.geteuid() == 0


class Network:
    """A switch, and hosts that have a cable to it. It changes nothing of this machine's own network."""

    def __init__(self) -> None:
        self.name = f"pk{os.getpid()}"
        self._made = [self.name]
        _run("ip", "netns", "add", self.name)
        self._inside("link", "add", "switch", "type", "bridge")
        self._inside("addr", "add", f"{self.address(1)}/24", "dev", "switch")
        self._inside("link", "set", "switch", "up")
        self._inside("link", "set", "lo", "up")

    @staticmethod
    def address(number: int) -> str:
        """Return an address in it."""
        return f"10.99.0.{number}"

    def add(self, number: int) -> str:
        """Return the name of a new namespace, which has a cable to the switch and this address."""
        name, cable = f"{self.name}-{number}", f"c{number}"
        _run("ip", "netns", "add", name)
        self._made.append(name)
        self._inside("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._inside("link", "set", cable, "master", "switch")
        self._inside("link", "set", cable, "up")
        for more in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{self.address(number)}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["route", "add", "default", "via", self.address(1)],
        ):
            _run("ip", "-n", name, *more)

        return name

    def pull(self, number: int, *, out: bool) -> None:
        """Pull the cable of a host, or put it back."""
        self._inside("link", "set", f"c{number}", "down" if out else "up")

    def close(self) -> None:
        """Take all of it away."""
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _inside(self, *command: str) -> None:
        _run("ip", "-n", self.name, *command)


def _join(namespace: str) -> None:
    with open(f"/run/netns/{namespace}", "rb") as found:
        _call("setns", found.fileno(), _NET)


class Host:
    """A machine: what is on it is lost with it.

    Args:
        folder: For its disk and its keeper's socket, whose path is short.
        number: Tells it from others.
        network: It is on; None if there is none.
    """

    def __init__(self, folder: Path, number: int, network: Network | None) -> None:
        self._number, self._network = number, network
        self.folder = folder / f"h{number}"
        self.disk = self.folder / "disk"
        self.socket = str(self.folder / "keeper")
        self.door = self.socket  #: by which trainings reach the keeper
        self._keeper: int | None = None  # the process
        self.disk.mkdir(parents=True)
        os.chmod(self.folder, 0o700)
        if network is not None:
            self._space = network.add(number)
            (self.folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{network.address(number)} host{number}\n"
            )
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(self.disk))

    def enter(self) -> None:
        """Be on this host from now on: called in a new process, which ends with the one that made it."""
        end_with_parent()
        if self._network is not None:
            _join(self._space)
            _call("unshare", _NAME | _MOUNTS)
            socket.sethostname(f"host{self._number}")
            _call("mount", None, b"/", None, _PRIVATE, None)
            _call("mount", bytes(self.folder / "hosts"), b"/etc/hosts", None, _BIND, None)

    def start(self, *, forked: bool = True) -> None:
        """Start its keeper, unless it runs.

        Args:
            forked: Whether it is a fork of this process, which runs no thread, and so is what finishes steps.
        """
        if self._keeper is None:
            self._keeper = fork(partial(self._keep, forked), -1)

    def _keep(self, forked: bool, _: int) -> None:
        self.enter()
        given = arguments(self.socket, 2**28, float("inf"), detached=False)
        if not forked:
            os.execv(sys.executable, [sys.executable, "-m", "penstock.keeper", *given])

        status = run_forked_keeper(given)
        assert status == 0, f"a keeper ended with status {status}"

    def wait_started(self) -> None:
        """Return once its keeper listens: a training would start another one."""
        until = time.monotonic() + SAYS_S
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as tried:
                tried.connect(self.socket)
                return

            assert time.monotonic() < until, "a keeper does not listen"
            time.sleep(0.01)

    @property
    def keeper_process(self) -> int:
        """The keeper's process."""
        assert self._keeper is not None, "it runs"
        return self._keeper

    def lose_keeper(self) -> None:
        """Kill its keeper. What that has begun, to finish the steps of a job, goes on."""
        if self._keeper is not None:
            os.kill(self._keeper, signal.SIGKILL)
            os.waitpid(self._keeper, 0)
            self._keeper = None

    def lose(self) -> None:
        """Lose all of it; what comes in its place is new and empty."""
        self.lose_keeper()
        self._end_all()
        self.free_disk()
        for each in self.disk.iterdir():
            shutil.rmtree(each)

    def _end_all(self) -> None:
        """Kill all that is left on it: what its keeper has begun."""
        if self._network is not None:
            found = subprocess.run(["ip", "netns", "pids", self._space], check=True, capture_output=True)
            for process in map(int, found.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def pull_cable(self, *, out: bool) -> None:
        """Cut it off from the others, or connect it again."""
        if self._network is not None:
            self._network.pull(self._number, out=out)

    def fill_disk(self) -> None:
        """Leave no room on its disk."""
        with suppress(OSError), open(self.disk / "filler", "wb") as filler:
            while True:
                filler.write(bytes(2**20))

    def forbid_disk(self) -> None:
        """Have its disk refuse every write, as one does that has found an error.

        The system does so at a moment only at which no file is open for writing, and so is asked again.
        """
        until = time.monotonic() + SAYS_S
        while True:
            try:
                return _run("mount", "-o", "remount,ro", str(self.disk))
            except subprocess.CalledProcessError:
                assert time.monotonic() < until, "a disk is written to all the time"

    def free_disk(self) -> None:
        """End both."""
        if self._network is not None:
            with suppress(subprocess.CalledProcessError):
                _run("mount", "-o", "remount,rw", str(self.disk))

        (self.disk / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """End its keeper, and take its disk away."""
        self.lose_keeper()
        self._end_all()
        if self._network is not None:
            subprocess.run(["umount", "-l", str(self.disk)], check=False, capture_output=True)


class Relay:
    """Passes on connections to a server, unless it is to make trouble. A process of its own.

    Args:
        port: Of the server, on loopback.
        network: Where it listens, so that hosts reach it; None for loopback.
    """

    def __init__(self, port: int, network: Network | None) -> None:
        self._trouble = mmap.mmap(-1, 1)
        address = "127.0.0.1" if network is None else network.address(1)
        read, write = os.pipe()
        self._process = fork(lambda out: self._serve(port, network, address, out), write)
        os.close(write)
        with os.fdopen(read) as told:
            self.endpoint = f"http://{address}:{told.readline().strip()}"

    def make(self, trouble: Trouble) -> None:
        """Make this trouble from now on."""
        self._trouble[0] = TROUBLES.index(trouble)

    def close(self) -> None:
        """End it."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    @property
    def _now(self) -> Trouble:
        return TROUBLES[self._trouble[0]]

    def _serve(self, port: int, network: Network | None, address: str, out: int) -> None:
        end_with_parent()
        with open("/proc/self/ns/net", "rb") as here:
            if network is not None:
                _join(network.name)

            listening = socket.create_server((address, 0), backlog=128)  # stays where it was made
            if network is not None:
                _call("setns", here.fileno(), _NET)

        os.write(out, f"{listening.getsockname()[1]}\n".encode())
        os.close(out)
        while True:
            client, _ = listening.accept()
            Thread(target=self._pass_on, args=(client, port), daemon=True).start()

    def _pass_on(self, client: socket.socket, port: int) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", port)) as server:
            to = {client: server, server: client}
            while True:
                ready, _, _ = select.select(list(to), [], [], 0.1)
                if self._now == "refuses":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                if self._now == "hangs":
                    time.sleep(0.05)
                    continue
                for source in ready:
                    data = source.recv(16_384 if self._now == "slow" else 2**18)
                    if not data:
                        return

                    to[source].sendall(data)
                    if self._now == "slow":
                        time.sleep(len(data) / SLOW_BYTES_S)


@contextmanager
def bucket_server(folder: Path) -> Generator[Server]:
    """Run a server of buckets, without obstore in this process: that has threads, and this one forks."""
    weed = program("weed")
    assert weed is not None, "it was looked for"
    with running_on_free_ports(
        lambda ports: seaweedfs_command(weed, folder, ports), folder, ENVIRONMENT
    ) as ports:
        server = Server("SeaweedFS", f"http://127.0.0.1:{ports[0]}")
        read, write = os.pipe()
        child = fork(lambda _: wait_for_bucket(server), write)
        os.close(read)
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0, "the bucket cannot be written"
        yield server


class Services:
    """The coordination services of jobs, one after another, in a process of its own.

    Args:
        folder: For its socket.
    """

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "service")
        read, write = os.pipe()
        self._process = fork(self._serve, write)
        os.close(write)
        with os.fdopen(read) as told:
            told.readline()

    def connected(self, number: int) -> KeyValues:
        """Return the service of a job, by its number; called in its processes."""
        manager = _Manager(self._address, b"proof")
        manager.connect()
        return cast("KeyValues", manager.service(number))  # type: ignore[attr-defined]  # it is registered

    def close(self) -> None:
        """End it."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def _serve(self, out: int) -> None:
        end_with_parent()
        services: dict[int, MemoryKeyValues] = {}

        def service(number: int) -> MemoryKeyValues:
            for earlier in [each for each in services if each < number]:
                del services[earlier]

            return services.setdefault(number, MemoryKeyValues())

        _Manager.register("service", service, exposed=("put", "wait", "under", "count", "delete"))
        server = _Manager(self._address, b"proof").get_server()
        os.write(out, b"ready\n")
        server.serve_forever()


class _Manager(BaseManager):
    """Where services are found."""


_Manager.register("service", exposed=("put", "wait", "under", "count", "delete"))


class Training:
    """A training in another process, and what it has said.

    Args:
        train: What it does, and says to the descriptor that it gets.
    """

    def __init__(self, train: Callable[[int], Awaitable[None]]) -> None:
        self._read, out = os.pipe()
        self._text = b""
        self.process = fork(lambda out: anyio.run(train, out), out)
        os.close(out)
        self.is_over = False

    @property
    def said(self) -> list[tuple[str, str]]:
        """All lines so far: a word, and the rest."""
        lines = self._text.decode().splitlines()
        return [(what, rest) for what, _, rest in [line.partition(" ") for line in lines]]

    def steps(self, what: str) -> list[int]:
        """The steps that it has said something of, in order."""
        return [int(rest) for each, rest in self.said if each == what]

    def hear(self, what: str, n_more: int = 1, within_s: float = SAYS_S) -> None:
        """Return when it has said something so many more times.

        Raises:
            AssertionError: If it says nothing for long, or has ended.
        """
        wanted, until = len(self._of(what)) + n_more, time.monotonic() + within_s
        while len(self._of(what)) < wanted:
            left_s = until - time.monotonic()
            assert left_s > 0, f"it did not say {what!r} within {within_s} s: {self._text.decode()}"
            if self._is_readable(left_s):
                assert self._take(), f"a training ended by itself: {self._text.decode()}"

    def kill(self) -> None:
        """Kill it, and read what it said. Idempotent."""
        if not self.is_over:
            self.is_over = True
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            while self._take():
                pass

            os.close(self._read)

    def _of(self, what: str) -> list[str]:
        return [rest for each, rest in self.said if each == what]

    def _is_readable(self, within_s: float) -> bool:
        ready, _, _ = select.select([self._read], [], [], within_s)
        return bool(ready)

    def _take(self) -> bool:
        found = os.read(self._read, 65536)
        self._text += found
        return bool(found)
