"""Copies of the parts of a job's steps in the keepers of other hosts, so that a lost host costs no step.

Once a step is kept, each process sends its part to a process on another host, which puts it into its own
keeper: into the directory that the sender has in its keeper. There the next job finds it as it finds any part
that its process does not need (`joint_tiers`).

All send the same step, and then the next one: a host that is lost takes the parts of several processes with
it, and what is left of them must be of one step. So the newest step that all have sent stays with the peers
until all have sent a newer one. It stays in the keeper that it was sent from, too, however many were kept
since: the host that is lost may be the one that has the copy.

It goes over TCP, as it is: not encrypted, but only between processes of one job. Both sides prove that they
know a token that the first process drew, and that all got by the coordination service. Who sends names a
process and a step, never a path, and so writes nowhere but in its own directory. Nobody listens unless a tier
asks for peers.
"""

from __future__ import annotations

__all__ = ("PeerCopies", "chosen_peers", "next_to_send")

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import msgpack
from anyio import (
    CancelScope,
    EndOfStream,
    Event,
    create_task_group,
    fail_after,
    move_on_after,
    sleep,
    wait_readable,
    wait_writable,
)
from anyio.abc import TaskGroup
from anyio.from_thread import check_cancelled

from penstock.checkpointer.engine import Engine
from penstock.handlers.formats.untrusted import check_inside
from penstock.handlers.stores.keeper.keeper_files import SplicePipe
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.publishing.paths import OF_PROCESSES, inside_of_process, temporary_path
from penstock.handlers.stores.publishing.reading import reading
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import CoordinationError, PeerError, PenstockError
from penstock.kernel.protocols.coordinator import Operation
from penstock.steps import step_directory as on_disk
from penstock.steps.joint_tiers import combined
from penstock.steps.step_names import NameFormat
from penstock.verification.copying import lengths_below

_HEADER_BYTES: Final = 2**24  # names and lengths of the files of a part
_BLOCK: Final = 2**20  # of a file, by one system call
_IDLE_S: Final = 60.0
"""A peer that takes or sends nothing for so long is given up."""
_AGAIN_S: Final = 1.0
_NAME_S: Final = 2.0
"""A name service that does not answer takes 10 s and more, and all processes would wait for it."""
_ANSWER_BYTES: Final = 4096
_KEPT: Final = b"kept"
_CALL_TIMEOUT: Final = struct.pack("@ll", 0, 200_000)
"""A `timeval`: after so long a call that waits returns, since it may be to end."""
_READY: Final = b"ready"
_WORKERS: Final = 2
_LOST: Final = (OSError, EndOfStream)


@final
@dataclass(frozen=True, slots=True)
class Peer:
    """A process of the job, as the others reach it."""

    host: str  #: tells its host from others
    address: str
    port: int


def chosen_peers(index: int, peers: Mapping[int, Peer], count: int) -> Sequence[int]:
    """Return to whom a process sends its parts: the next ones on other hosts, one of each host. Pure.

    Args:
        index: Of the process.
        peers: All that take part, itself among them.
        count: So many, if there are so many other hosts.
    """
    ordered = sorted(peers)
    at = ordered.index(index)
    chosen: dict[str, int] = {}
    for other in [*ordered[at + 1 :], *ordered[:at]]:
        host = peers[other].host
        if host != peers[index].host and host not in chosen and len(chosen) < count:
            chosen[host] = other

    return list(chosen.values())


@final
@dataclass(slots=True)
class PeerCopies:
    """Sends parts to other hosts, and takes those of others. Used in one event loop.

    Args:
        engine: Of the tier.
        path: The directory of this process in its keeper.
        names: Of steps.
        host: Tells this host from others.
        count: To how many other hosts each part goes.
    """

    engine: Engine
    path: str
    names: NameFormat
    host: str
    count: int
    _threads: Threads = field(default_factory=partial(Threads, _WORKERS))
    # A file takes a thread for as long as it comes. None that sends waits for one that receives, or two
    # processes could wait for each other; and all that send have one here, or would be given up.
    _sends: Threads = field(default_factory=partial(Threads, 1))
    _receives: Threads = field(default_factory=partial(Threads, 1))
    _peers: Mapping[int, Peer] = field(default_factory=dict[int, Peer])
    _token: bytes = b""
    _waiting: int | None = None  # of the steps that wait, the newest alone stays
    _is_busy: bool = False
    _sending: int | None = None  # that all send, or have sent last
    _sent: int | None = None  # the last one, if each of its peers has it
    _whole: int | None = None  # the last one that all processes have sent
    _asked: Event = field(default_factory=Event)
    _changed: Event = field(default_factory=Event)

    @asynccontextmanager
    async def live(self, operation: Callable[[], Operation], tasks: TaskGroup) -> AsyncGenerator[None]:
        """Find the others, and listen to them, until the block is left.

        Args:
            operation: Returns one that is not joined yet. All processes come, or all raise.
            tasks: Ends with the manager.

        Raises:
            PeerError: If another process failed, or did not come.
            OSError: If nothing can be listened to.
        """
        with socket.create_server(("", 0)) as listener:
            listener.setblocking(False)
            here = Peer(self.host, await _own_address(), int(listener.getsockname()[1]))
            await self._meet(operation(), here)
            n_others = len(self._targets)
            if n_others < self.count:
                self.engine.events.warning("step.peers_missing", wanted=self.count, hosts=n_others)

            serving, over = CancelScope(), Event()

            async def serve() -> None:
                try:
                    with serving:
                        await self._serve(listener)
                finally:
                    over.set()

            tasks.start_soon(serve)
            tasks.start_soon(self._run, operation)
            try:
                yield
            finally:
                serving.cancel()
                with CancelScope(shield=True):  # it ends at once, and must not use what is closed then
                    await over.wait()

    async def _serve(self, listener: socket.socket) -> None:
        async with create_task_group() as tasks:
            while True:
                await wait_readable(listener)
                try:
                    connected, _ = listener.accept()
                except BlockingIOError:  # it has gone again
                    continue
                except OSError:  # no more descriptors, for now
                    await sleep(_AGAIN_S)
                    continue

                tasks.start_soon(self._take, _Connection(connected))

    async def _meet(self, operation: Operation, here: Peer) -> None:
        def all_of(parts: Mapping[int, Any]) -> object:
            return secrets.token_hex(32), parts

        async def own() -> object:
            return here.host, here.address, here.port

        with _reading():
            token, peers = await combined(operation, "peers", own, all_of)
            self._peers = {
                int(index): Peer(str(host), str(address), int(port))
                for index, (host, address, port) in peers.items()
            }
            self._token = bytes.fromhex(token)

        senders = [each for each in self._peers if self._index in self._chosen_by(each)]
        self._receives.allow(len(senders))

    @property
    def _index(self) -> int:
        return self.engine.coordinator.process_index

    @property
    def _targets(self) -> Sequence[int]:
        return self._chosen_by(self._index)

    def _chosen_by(self, index: int) -> Sequence[int]:
        return chosen_peers(index, self._peers, self.count)

    @property
    def _keeper(self) -> KeeperStore:
        store = self.engine.store
        assert isinstance(store, KeeperStore), "a tier in memory is in a keeper"
        return store

    def offer(self, step: int) -> None:
        """Send a step that is kept, unless a newer one is kept before its turn."""
        self._waiting = step if self._waiting is None else max(step, self._waiting)
        self._asked.set()

    def owes(self, step: int) -> bool:
        """True if what is left after the loss of a host may be whole with this step alone, or soon."""
        return step in {self._whole, self._sending}

    async def settle(self) -> None:
        """Wait until no step waits to be sent. What cannot be sent is no error: it was logged."""
        while self._is_busy or self._waiting is not None:
            await self._changed.wait()

    async def _run(self, operation: Callable[[], Operation]) -> None:
        while True:
            if self._waiting is None:
                self._asked = Event()
                await self._asked.wait()

            self._is_busy = True
            try:
                await self._send_next(operation())
            except (PeerError, CoordinationError) as error:
                self.engine.events.warning(
                    "step.peer_failed", step=self._waiting, peer=None, error=repr(error)
                )
                await sleep(_AGAIN_S)  # one of the job is ending, or will be back
            finally:
                self._is_busy = False
                self._changed.set()
                self._changed = Event()

    async def _send_next(self, operation: Operation) -> None:
        """Send the newest step that waits in all processes to each peer of this one."""

        def choose(parts: Mapping[int, Any]) -> object:
            return next_to_send(list(parts.values()))

        async def own() -> object:
            return self._waiting, self._sent

        with _reading():
            step, whole = await combined(operation, "peers", own, choose)
            self._sending = step = int(step)
            self._whole = self._whole if whole is None else int(whole)

        if self._waiting == step:
            self._waiting = None

        kept = [await self._send_logged(step, index) for index in self._targets]
        self._sent = step if all(kept) else None

    async def _send_logged(self, step: int, index: int) -> bool:
        began = time.perf_counter()
        try:
            nbytes = await self._send(step, index)
        except (*_LOST, PenstockError) as error:
            self.engine.events.warning("step.peer_failed", step=step, peer=index, error=repr(error))
            return False

        seconds = time.perf_counter() - began
        self.engine.events.info("step.peer_kept", step=step, peer=index, nbytes=nbytes, seconds=seconds)
        return True

    async def _send(self, step: int, index: int) -> int:
        """Send a step to a process; return its bytes once it is in its keeper."""
        store, run = self.engine.store, self._threads.run
        path = f"{self.path}/{self.names.name(step)}"
        async with reading(store, self._threads, path) as source:
            lengths = await run(lengths_below, store, path)
            with await _connected(self._peers[index]) as connection:
                await self._prove(connection)
                header = {"process": self._index, "step": step, "files": lengths, "whole": self._whole}
                await connection.send_frame(msgpack.packb(header))
                answer = await connection.frame(_ANSWER_BYTES)
                if answer == _READY:
                    with connection.waiting_in_calls():
                        for name, nbytes in lengths.items():
                            await self._sends.run(self._send_file, connection, f"{path}/{name}", nbytes)

                    answer = await connection.frame(_ANSWER_BYTES)

                await source.end()

        if answer != _KEPT:
            raise CoordinationError(f"process {index} did not keep it: {answer.decode(errors='replace')}")

        return sum(lengths.values())

    def _send_file(self, connection: _Connection, path: str, nbytes: int) -> None:
        """Send a file from the keeper's pages: the system does, and no byte of it comes here. Blocking."""
        with closing(self._keeper.open_data_file(path)) as file:
            at = 0
            while at < nbytes:
                part = partial(file.send, connection.socket, at, min(_BLOCK, nbytes - at))
                at += connection.moved(part)

    async def _prove(self, connection: _Connection) -> None:
        """Prove to a process that listens that this one is of the job, and have it prove the same."""
        theirs, mine = await connection.frame(32), secrets.token_bytes(32)
        await connection.send_frame(mine + self._proof(b"sends", theirs, mine))
        if not hmac.compare_digest(await connection.frame(32), self._proof(b"takes", mine, theirs)):
            raise CoordinationError("what listens there is no process of this job")

    def _proof(self, role: bytes, one: bytes, other: bytes) -> bytes:
        return hmac.digest(self._token, role + one + other, "sha256")

    async def _take(self, connection: _Connection) -> None:
        """Answer one process that connects."""
        with connection:
            try:
                mine = secrets.token_bytes(32)
                await connection.send_frame(mine)
                answer = await connection.frame(64)
                theirs, proof = answer[:32], answer[32:]
                if not hmac.compare_digest(proof, self._proof(b"sends", mine, theirs)):
                    self.engine.events.warning("step.peer_refused", problem="it does not know the token")
                    return

                await connection.send_frame(self._proof(b"takes", theirs, mine))
                header = self._read_header(await connection.frame(_HEADER_BYTES))
                await self._keep(connection, *header)
                await connection.send_frame(_KEPT)
            except (*_LOST, ValueError, KeyError, TypeError, AttributeError, PenstockError) as error:
                self.engine.events.warning("step.peer_refused", problem=repr(error))
                with move_on_after(1.0), suppress(*_LOST):
                    await connection.send_frame(repr(error).encode()[:_ANSWER_BYTES])

    def _read_header(self, data: bytes) -> tuple[int, int, Mapping[str, int], int | None]:
        """Return the process that sends, the step, the lengths of its files by name, and which step stays."""
        told: Any = msgpack.unpackb(data)
        process, step, whole = int(told["process"]), int(told["step"]), told["whole"]
        files = {str(name): int(nbytes) for name, nbytes in told["files"].items()}
        if process not in self._peers or process == self._index:
            raise ValueError(f"{process} is no other process of this job")
        for name in files:
            check_inside("what a peer sends", name)

        return process, step, files, None if whole is None else int(whole)

    async def _keep(
        self,
        connection: _Connection,
        process: int,
        step: int,
        files: Mapping[str, int],
        whole: int | None,
    ) -> None:
        """Put what comes into this host's keeper, as the step of another process.

        Of its earlier ones, the one stays that all processes have sent; if it is not known, the last.
        """
        store, run = self.engine.store, self._threads.run
        place = f"{OF_PROCESSES}/{process}/{inside_of_process(self.path)}"
        path = f"{place}/{self.names.name(step)}"
        build = Workspace(store, self._threads, path, temporary_path(path), overwrite=True)
        try:
            await build.open()
            for folder in sorted({os.path.dirname(name) for name in files} - {""}):
                await run(build.make_directory, folder)

            await connection.send_frame(_READY)
            with connection.waiting_in_calls():
                for name, nbytes in files.items():
                    await self._receives.run(self._keep_file, connection, build.path(name), nbytes)

            await build.publish()
        except BaseException:
            with move_on_after(_IDLE_S, shield=True):
                await build.discard()

            raise
        finally:
            build.release()

        await run(self._tidy, place, step, whole)

    def _keep_file(self, connection: _Connection, path: str, nbytes: int) -> None:
        """Put a file that comes into the keeper's pages: the system does, as when it is sent. Blocking."""
        store = self._keeper
        if nbytes < store.placement.document_bytes:
            store.write_file(path, connection.received(nbytes))
            return

        with closing(store.create_data_file(path)) as file, closing(SplicePipe(_BLOCK)) as pipe:
            file.allocate(nbytes)
            at = 0
            while at < nbytes:
                part = partial(file.receive, connection.socket, pipe, at, min(_BLOCK, nbytes - at))
                moved = connection.moved(part)
                if not moved:
                    raise EndOfStream

                at += moved

            file.sync()

    def _tidy(self, place: str, came: int, whole: int | None) -> None:
        """Remove steps of a process that are of no use, and let the keeper end without the copy. Blocking."""
        store = self._keeper
        store.note_elsewhere(f"{place}/{self.names.name(came)}")
        found = {self.names.step(name): name for name in on_disk.list_root(store, place)}
        there = [step for step in found if step is not None]
        earlier = max([step for step in there if step != came], default=came) if whole is None else whole
        for step in there:
            if step not in {came, earlier}:
                on_disk.delete_step(store, place, found[step], None)


def next_to_send(said: Sequence[tuple[int, int | None]]) -> tuple[int, int | None]:
    """Return which step all send next, and which one all have sent last, if they have. Pure.

    Args:
        said: Of each process the newest step that waits, and the one that all its peers have got last.
    """
    sent = {last for _, last in said}
    return min([waiting for waiting, _ in said]), sent.pop() if len(sent) == 1 else None


@contextmanager
def _reading() -> Generator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise CoordinationError(f"what another process says of peers cannot be read: {error}") from error


async def _own_address(
    look_up: Callable[[str], str] = socket.gethostbyname, within_s: float = _NAME_S
) -> str:
    """Return the address by which other hosts reach this one: that of its name, or of its default route.

    Args:
        look_up: Returns the address of a name. Blocking; it is left alone if it takes too long.
        within_s: How long it may take.
    """
    with suppress(OSError), move_on_after(within_s):
        found = await Threads(1).leaving_calls(0.0).run(look_up, socket.gethostname())
        if not found.startswith("127."):
            return found

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent: this only asks which interface it would be
        return str(probe.getsockname()[0])

    return "127.0.0.1"


@final
class _Connection:
    """A TCP connection: frames are sent and awaited in the event loop, and files moved by calls in threads.

    It is no stream of AnyIO. One of these may have read ahead what the system is to move into a file.

    Args:
        connected: Its socket, which is closed in the end.
    """

    __slots__ = ("socket",)

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def send_frame(self, data: bytes) -> None:
        """Send some bytes with their number.

        Raises:
            TimeoutError: If the other side does not take them within `_IDLE_S`.
        """
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        with fail_after(_IDLE_S):
            while rest:
                try:
                    rest = rest[self.socket.send(rest) :]
                except BlockingIOError:
                    await wait_writable(self.socket)

    async def frame(self, most: int) -> bytes:
        """Return the bytes that the other side has sent with their number.

        Raises:
            ValueError: If they are more than `most`.
            EndOfStream: If the other side has closed the connection.
            TimeoutError: If they do not come within `_IDLE_S`.
        """
        with fail_after(_IDLE_S):
            nbytes = int.from_bytes(await self._exactly(4), "big")
            if nbytes > most:
                raise ValueError(f"a message of {nbytes} bytes, where {most} are allowed")

            return await self._exactly(nbytes)

    async def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            try:
                part = self.socket.recv(min(_BLOCK, nbytes - len(data)))
            except BlockingIOError:
                await wait_readable(self.socket)
                continue
            if not part:
                raise EndOfStream

            data += part

        return bytes(data)

    @contextmanager
    def waiting_in_calls(self) -> Generator[None]:
        """Have calls in threads wait for the other side, for a short time, as long as the block lasts.

        A system call that waits moves a block as a whole; one that does not, a piece of it again and again.
        """
        self.socket.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, _CALL_TIMEOUT)
        try:
            yield
        finally:
            self.socket.setblocking(False)

    def moved(self, move: Callable[[], int]) -> int:
        """Return what a call moves that waits for the other side. Blocking; ended by a cancellation.

        Args:
            move: Raises `BlockingIOError` if it has waited in vain.

        Raises:
            TimeoutError: If nothing is moved within `_IDLE_S`.
        """
        until = time.monotonic() + _IDLE_S
        while True:
            check_cancelled()
            with suppress(BlockingIOError):
                return move()

            if time.monotonic() > until:
                raise TimeoutError(f"the other side did nothing for {_IDLE_S:g} s")

    def received(self, nbytes: int) -> bytes:
        """Return the next bytes. Blocking, as `moved`.

        Raises:
            EndOfStream: If the other side has closed the connection before.
        """
        data = bytearray(nbytes)
        rest = memoryview(data)
        while rest:
            moved = self.moved(partial(self.socket.recv_into, rest))
            if not moved:
                raise EndOfStream

            rest = rest[moved:]

        return bytes(data)


async def _connected(peer: Peer) -> _Connection:
    """Connect to a process.

    Raises:
        OSError: If it cannot be reached; also within `_IDLE_S`.
    """
    connection = _Connection(socket.socket())
    try:
        with fail_after(_IDLE_S):
            try:
                connection.socket.connect((peer.address, peer.port))
            except BlockingIOError:
                await wait_writable(connection.socket)

    except BaseException:
        connection.socket.close()
        raise

    return connection  # if it was refused, the first frame says so
