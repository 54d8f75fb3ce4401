"""Answers the clients of a keeper.

All that changes the tree runs in the event loop and never waits in between. Only memory is made, and given
back, in worker threads: that takes a tenth of a second for each 256 MiB.
"""

from __future__ import annotations

__all__ = ("Keeper",)

import errno
import math
import os
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal, final

from anyio import (
    CapacityLimiter,
    Event,
    Lock,
    create_task_group,
    move_on_after,
    sleep,
    to_thread,
    wait_readable,
    wait_writable,
)
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from penstock.handlers.stores.keeper.messages import (
    MOST_DOCUMENT_BYTES,
    Create,
    Finish,
    Found,
    Get,
    Head,
    Hold,
    List,
    Look,
    MakeDirectory,
    MakeHeld,
    Move,
    Names,
    NoteElsewhere,
    Opened,
    Prepare,
    Put,
    Refused,
    Release,
    Remove,
    Request,
    Reserve,
    Reserved,
    Room,
    Share,
    Status,
    StatusAnswer,
    Stop,
    TakeOver,
    decode_request,
    encode_answer,
    encode_refusal,
    is_own_peer,
    peer_process,
)
from penstock.keeper.finishing import Finishers
from penstock.keeper.pages import STEP_BYTES, NoRoom, PagePool, Pages, close_all
from penstock.keeper.tree import ENCODED, Directory, File, Refusal, Tree

_POOL_S: Final = 30.0
"""So long after the last client has gone, no file is ready any more: no save is near."""

_AGAIN_S: Final = 0.1
_READY_FROM: Final = 2**20  # smaller files are as quick without


@final
class _Client:
    """One connection: what it asks is answered in order."""

    __slots__ = ("_socket", "ended", "process")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.process = peer_process(connected)
        self.ended: Literal["released", "broken"] | None = None

    def has_ended(self) -> Literal["released", "broken"] | None:
        """Return how it ended. What has a hold sends one message more: that it gives it up."""
        if self.ended is None:
            try:
                data = self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                return "broken"

            return "released" if data else "broken"

        return self.ended

    async def receive(self) -> Request | None:
        """Return the next request; None if there is none any more.

        Raises:
            ValueError: If it is none.
        """
        head = await self._read(Head.nbytes)
        if head is None:
            return None

        body = await self._read(Head.decode(head)[0])
        return None if body is None else decode_request(body)

    async def _read(self, nbytes: int) -> bytearray | None:
        data = bytearray(nbytes)
        rest = memoryview(data)
        while rest:
            try:
                moved = self._socket.recv_into(rest)
            except BlockingIOError:
                await wait_readable(self._socket)
                continue
            except OSError:
                return None
            if not moved:
                return None

            rest = rest[moved:]

        return data

    async def send(self, body: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Send an answer, and close the descriptors; return whether it could be sent."""
        rest = memoryview(Head.encode(body, len(descriptors)) + body)
        try:
            while rest:
                try:
                    moved = socket.send_fds(self._socket, [rest], descriptors)
                except BlockingIOError:
                    await wait_writable(self._socket)
                    continue

                for number in descriptors:
                    os.close(number)

                descriptors = ()
                rest = rest[moved:]
        except OSError:
            return False
        finally:
            for number in descriptors:
                os.close(number)

        return True

    def close(self) -> None:
        self._socket.close()


@final
class Keeper:
    """The process's state, and its answers.

    Args:
        path: Where it listens.
        pool: The memory.
        idle_s: After so many seconds without a client it ends, unless it holds what no other tier has.
    """

    def __init__(self, path: str, pool: PagePool, idle_s: float = math.inf) -> None:
        self._path, self._pool, self._idle_s = path, pool, idle_s
        self._tree = Tree(self._dropped)
        self._began = time.monotonic()
        self._n_clients = 0
        self._changed = Event()  # when a client comes or goes
        self._stopped = Event()
        self._filling = Lock(fast_acquire=True)  # one after the other, since each looks at what is free
        self._threads = CapacityLimiter(4)
        self._tasks: TaskGroup | None = None
        self._finishers = Finishers(self._tree, path)

    async def serve(self, listener: socket.socket) -> None:
        """Answer all clients, until it is stopped or idle for long enough.

        Args:
            listener: Listens and does not block; it is closed in the end.
        """
        with listener:
            async with create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._accept, listener)
                tasks.start_soon(self._end_when_idle)
                await self._stopped.wait()
                tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """End it, with all that it holds."""
        self._stopped.set()

    async def _accept(self, listener: socket.socket) -> None:
        assert self._tasks is not None, "it serves"
        while True:
            await wait_readable(listener)
            try:
                connected, _ = listener.accept()
            except BlockingIOError:  # it has gone again
                continue
            except OSError:  # no more descriptors, for now
                await sleep(_AGAIN_S)
                continue

            connected.setblocking(False)
            self._tasks.start_soon(self._serve_one, _Client(connected), is_own_peer(connected))

    async def _serve_one(self, client: _Client, is_own: bool) -> None:
        self._count(1)
        is_broken = True
        try:
            if not is_own:
                await client.send(encode_refusal(Refused(errno.EACCES, "this keeper is another user's")))
                return

            while (request := await client.receive()) is not None:
                if isinstance(request, Release):
                    is_broken = False
                    return

                body, descriptors = await self._answered(client, request)
                if not await client.send(body, descriptors):
                    return
                if isinstance(request, Stop) and self._is_stopping:
                    self.stop()
        except ValueError as error:  # no message of ours: what follows it means nothing, either
            with suppress(OSError):
                await client.send(encode_refusal(Refused(errno.EPROTO, str(error))))
        finally:
            client.ended = "broken" if is_broken else "released"
            left = self._tree.written_by(client) if is_broken else None
            self._tree.release(client, is_broken=is_broken)
            if left is not None and self._tasks is not None:
                self._finishers.start(left, self._tasks)

            client.close()
            self._count(-1)
            await self._close_given_back()

    def _count(self, change: int) -> None:
        self._n_clients += change
        changed, self._changed = self._changed, Event()
        changed.set()

    _is_stopping = False

    async def _answered(self, client: _Client, request: Request) -> tuple[bytes, Sequence[int]]:
        found: object
        try:
            if isinstance(request, Reserve):
                found, descriptors = await self._reserve(request)
            elif isinstance(request, TakeOver):
                await self._finishers.take_over(request, client.process)
                found, descriptors = None, ()
            else:
                found, descriptors = self._answer(client, request)
        except Refusal as refusal:
            return encode_refusal(Refused(refusal.errno, refusal.problem)), ()
        except NoRoom as full:
            return encode_refusal(Refused(errno.ENOSPC, str(full))), ()
        except OSError as error:
            problem = f"the keeper cannot: {error.strerror}"
            return encode_refusal(Refused(error.errno or errno.EIO, problem)), ()
        except Exception as defect:  # what it holds for all others must not end with it
            traceback.print_exc()
            return encode_refusal(Refused(errno.EIO, f"the keeper failed: {defect!r}")), ()
        finally:
            await self._close_given_back()

        return encode_answer(found), descriptors

    def _answer(self, client: _Client, request: Request) -> tuple[object, Sequence[int]]:
        """Do what is asked; return the answer, and the descriptors that go with it."""
        tree = self._tree
        match request:
            case Look():
                return [self._found(path) for path in request.paths], ()
            case List():
                return Names(*tree.names(request.path, request.after)), ()
            case MakeDirectory():
                tree.make_directory(request.path)
            case MakeHeld():
                return Found(True, 0, tree.make_held(request.path, client).number), ()
            case Hold():
                held = tree.hold(request.path, client, is_shared=request.is_shared)
                return Found(True, 0, held.number), ()
            case Put():
                if len(request.data) > MOST_DOCUMENT_BYTES:
                    raise Refusal(errno.EFBIG, "is no document")

                return tree.put(request.path, request.data, create=request.create), ()
            case Get():
                return self._opened(tree.file(request.path))
            case Create():
                return Found(False, 0, tree.create(request.path).number), ()
            case Finish():
                self._finish(request)
            case Move():
                tree.move(
                    request.source,
                    request.destination,
                    request.how,
                    publishes=request.publishes,
                    expected=request.expected,
                )
                if request.publishes and f"/{ENCODED}" not in request.destination:  # that goes at once
                    self._prepare_next(request.destination)
            case Share():
                tree.share(request.source, request.destination)
            case Remove():
                tree.remove(request.path, request.expected)
            case Room():
                return self._pool.room_bytes, ()
            case Prepare():
                self._prepare(request.sizes)
            case NoteElsewhere():
                tree.directory(request.path).is_elsewhere = True
            case Status():
                return self._status(), ()
            case Stop():
                self._check_stoppable(request.is_forced)
            case _:
                raise Refusal(errno.EPROTO, "is no question")

        return None, ()

    def _found(self, path: str) -> Found | None:
        node = self._tree.find(path)
        if node is None:
            return None

        return Found(
            isinstance(node, Directory), 0 if isinstance(node, Directory) else node.nbytes, node.number
        )

    @staticmethod
    def _opened(file: File) -> tuple[Opened, Sequence[int]]:
        if file.pages is None or not file.nbytes:
            return Opened(file.nbytes, file.data or b""), ()

        return Opened(file.nbytes, None), (file.pages.open(writing=False),)

    async def _reserve(self, request: Reserve) -> tuple[Reserved, Sequence[int]]:
        """Give a file pages, which takes a while if they are fresh."""
        await self._look_for_ready(request)
        pages = self._pages_of(request)
        pages.n_reserving += 1  # before anything is waited for: another file could get the pages
        try:
            await self._fill(pages, request.nbytes)
            if pages.is_dropped:
                raise Refusal(errno.ENOENT, "the file was removed")

            descriptors = pages.open_for_writing() if request.wants_descriptors else ()
        finally:
            pages.n_reserving -= 1
            if pages.is_dropped and not pages.n_reserving:
                self._pool.give_back(pages)

        return Reserved(pages.nbytes, pages.is_zero, pages.id), descriptors

    async def _look_for_ready(self, request: Reserve) -> None:
        """Wait until what is being made ready just now can be taken, if nothing else is there for a file."""
        file = self._tree.data_file(request.number)
        if file.pages is None and self._pool.lacks([_expected(request)]):
            async with self._filling:
                pass

    def _pages_of(self, request: Reserve) -> Pages:
        file = self._tree.data_file(request.number)
        if file.pages is None:
            file.pages = self._pool.take(_expected(request))

        return file.pages

    async def _fill(self, pages: Pages, nbytes: int) -> None:
        while pages.nbytes < nbytes:
            async with self._filling:
                if pages.nbytes < nbytes:
                    await self._fill_some(pages, nbytes)

    async def _fill_some(self, pages: Pages, nbytes: int) -> None:
        """Make the next pages of a file, of which some of the first bytes have none. `_filling` is held."""
        start, gave_way = self._pool.claim(pages, min(pages.nbytes + STEP_BYTES, nbytes))
        try:
            if gave_way:
                await to_thread.run_sync(close_all, gave_way, limiter=self._threads)

            end = pages.nbytes
            await to_thread.run_sync(partial(self._pool.fill, pages, start, end), limiter=self._threads)
        except OSError:
            self._pool.unclaim(pages, start)
            raise

        self._pool.fresh_bytes += end - start

    def _finish(self, request: Finish) -> None:
        file = self._tree.data_file(request.number)
        nbytes = 0 if file.pages is None else file.pages.nbytes
        if request.nbytes > nbytes:
            raise Refusal(errno.EINVAL, f"has pages for {nbytes} bytes alone")

        file.nbytes = request.nbytes if request.is_whole else max(file.nbytes, request.nbytes)
        if file.pages is not None and request.is_whole:
            self._pool.shorten(file.pages, file.nbytes)

    def _dropped(self, file: File) -> None:
        if file.pages is not None:
            self._pool.give_back(file.pages)

    async def _close_given_back(self) -> None:
        closing = self._pool.closing()
        if closing:
            await to_thread.run_sync(close_all, closing, limiter=self._threads)

    def _prepare_next(self, path: str) -> None:
        """Have files ready for the step after the one at `path`, where its directory grows.

        Where as much was there before, a step has gone since, and another one goes now, whose pages are used
        again. To make others meanwhile would take as long as a save, and they would be given back.
        """
        sizes = [file.nbytes for file in self._tree.data_files(path)]
        is_more = self._tree.note_growth(path) >= sum(sizes) // 2
        self._prepare(sizes, is_more=is_more)

    def _prepare(self, sizes: Sequence[int], *, is_more: bool = True) -> None:
        """Have files of these lengths ready.

        Args:
            sizes: Of all that a save needs.
            is_more: Whether those are made that are missing now.
        """
        wanted = sum(sizes)  # long documents, too: their pages are used again, and not made in advance
        self._pool.most_idle_bytes = max(wanted + wanted // 8, self._pool.most_idle_bytes // 2)
        missing = self._pool.lacks([size for size in sizes if size >= _READY_FROM]) if is_more else ()
        if missing and self._tasks is not None:
            self._tasks.start_soon(self._make_ready, missing)

    async def _make_ready(self, sizes: Sequence[int]) -> None:
        """Make files ready, step by step: a save that begins meanwhile takes one as it is, and this ends."""
        pool = self._pool
        for size in sizes:
            ready: Pages | None = None
            while ready is None or ready.nbytes < size:
                async with self._filling:
                    # What others gave back meanwhile may be enough, and what they took may leave no room.
                    room = min(pool.most_idle_bytes, pool.room_bytes) - pool.idle_bytes
                    if room < size - (0 if ready is None else ready.nbytes):
                        return
                    if ready is not None and not pool.take_ready(ready):
                        return
                    try:
                        ready = ready or pool.make()
                        await self._fill_some(ready, size)
                    except (NoRoom, OSError):  # no memory, or no more descriptors: a save makes its own
                        return
                    finally:
                        if ready is not None:
                            pool.add_ready(ready)

                await self._close_given_back()
                await checkpoint()

    async def _end_when_idle(self) -> None:
        while True:
            changed = self._changed
            if not self._n_clients:
                with move_on_after(min(_POOL_S, self._idle_s)):
                    await changed.wait()
                    continue

                self._pool.trim(0)
                await self._close_given_back()
                with move_on_after(max(0.0, self._idle_s - _POOL_S)):
                    await changed.wait()
                    continue

                if not self._tree.holds_the_only_copy:
                    self.stop()

            await changed.wait()

    def _check_stoppable(self, is_forced: bool) -> None:
        if not is_forced and self._tree.holds_the_only_copy:
            only = [step.path for step in self._tree.steps() if not step.is_elsewhere]
            what = ", ".join(only) if only else "files outside of checkpoints"
            raise Refusal(errno.ENOTEMPTY, f"holds what no other tier has: {what}")

        self._is_stopping = True

    def _status(self) -> StatusAnswer:
        pool, documents = self._pool, self._tree.document_bytes
        return StatusAnswer(
            pid=os.getpid(),
            version=_version(),
            socket=self._path,
            uptime_s=time.monotonic() - self._began,
            limit_bytes=pool.limit,
            used_bytes=pool.used_bytes + documents,
            kept_bytes=pool.lent_bytes + documents,
            lingering_bytes=pool.lingering_bytes,
            pool_bytes=pool.idle_bytes,
            pool_files=pool.idle_files,
            reused_bytes=pool.reused_bytes,
            fresh_bytes=pool.fresh_bytes,
            n_connections=self._n_clients,
            steps=list(self._tree.steps()),
        )


def _expected(request: Reserve) -> int:
    return max(request.expected, request.nbytes)


def _version() -> str:
    from importlib.metadata import version  # it takes as long as all else that a keeper does until it listens

    return version("penstock")
