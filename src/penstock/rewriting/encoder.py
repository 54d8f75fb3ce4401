"""Encodes checkpoints in a process of its own: `python -m penstock.rewriting.encoder`.

A codec takes ten times the processor time of a plain save. In a process with a low priority it takes none of
the training's, which would otherwise share its interpreter with it, and gets what the training leaves.

The process reads what to encode from its standard input, a line for each, and answers each with a line. The
end of the input is the end of its work: if who started it is gone, or gives it up.
"""

from __future__ import annotations

__all__ = ("Encoded", "Encoder", "main")

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any, BinaryIO, Final, final

import anyio
from anyio import BrokenResourceError, CancelScope, EndOfStream, IncompleteRead, Lock, move_on_after
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from structlog.stdlib import BoundLogger

from penstock.config.config import Config
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import (
    CorruptCheckpointError,
    ExpansionError,
    KeeperLostError,
    PenstockError,
    StorageError,
    UnsupportedFormatError,
)
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.kernel.protocols.stores import Store
from penstock.rewriting.encoding import Encoding, encode_checkpoint, encoded_chunk
from penstock.stores.store_finder import StoreFinder

_SHARE: Final = 4  # of the budget, as for a copy of files
_MOST_BYTES: Final = 256 * 2**20
"""Eight chunks of 16 MiB, and what they become: more would be no quicker."""

_NICENESS: Final = 10
_LINE: Final = 2**20
_UNDOING_S: Final = 60.0
_LOOKS_S: Final = 5.0


@final
@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoding that is done."""

    nbytes: int  #: of all files of the result
    processor_s: float | None  #: of the process that did nothing else meanwhile; None if there was none


@final
class Encoder:
    """Encodes checkpoints, one at a time, under a memory budget. Used in one event loop; close it.

    The process is started when there is something to encode, and stays for the next. It cannot do what no
    other process can reach: a store that was given as an object, or memory of this process. That is encoded
    here, and so is what a process that cannot be started, or is lost, leaves undone.

    Args:
        config: Of the manager: how stores are reached, and how codecs are chosen.
        stores: The same stores, in this process.
        memory: Leases a quarter of the budget, of up to 256 MiB, to each encoding.
        events: Tells of a lost process.
        command: Starts one, with the options of an interpreter behind it.
    """

    def __init__(
        self,
        config: Config,
        stores: StoreFinder,
        memory: MemoryRegulator,
        events: BoundLogger,
        command: Sequence[str] = (sys.executable,),
    ) -> None:
        self._command = (*command, "-P", "-m", "penstock.rewriting.encoder")
        self._options = Encoding.options_of(config)
        self._has_others = not stores.is_given  # whether another process can reach the stores
        self._memory, self._events = memory, events
        self.process: Process | None = None  #: that encodes; None before there is something to do
        self._turn = Lock()

    @property
    def _limit(self) -> int:
        return max(1, min(self._memory.limit // _SHARE, _MOST_BYTES))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an encoded chunk, about, that the budget allows."""
        return encoded_chunk(self._limit)

    async def encode(
        self,
        source: Store,
        path: str,
        target: Store,
        destination: str,
        form: SaveFormat,
        *,
        overwrite: bool,
        is_here_alone: bool = False,
        chunk_bytes: int | None = None,
        processes: Sequence[int] = (),
        process: int = 0,
    ) -> Encoded:
        """Write a checkpoint again as a format says; see `encode_checkpoint`, also for what it raises.

        Args:
            source: Where it is.
            path: Of the checkpoint.
            target: Where it goes.
            destination: The path there.
            form: How arrays are written.
            overwrite: Replace what is there.
            is_here_alone: Whether what is to be read is in memory of this process.
            chunk_bytes: Of an encoded chunk, about; by default as the memory allows.
            processes: Who see all of the checkpoint, and write a share each; none if one writes all of it.
            process: Which of them this one is.

        Cancellation:
            Returns when nothing is left at the destination.
        """
        limit = self._limit
        encoding = Encoding(
            path, destination, form, limit, overwrite, chunk_bytes, processes, process, self._options
        )
        async with self._turn:
            lease = await self._memory.acquire(limit)
            try:
                if self._has_others and not is_here_alone:
                    try:
                        return await self._elsewhere(encoding)
                    except KeeperLostError:
                        pass  # it may have left what it held in memory of this process
                    except PenstockError:
                        raise
                    except (OSError, EndOfStream, IncompleteRead, BrokenResourceError, ValueError) as error:
                        self._events.warning("step.encoder_lost", path=path, error=repr(error))
                        await self.close()

                return Encoded(await encode_checkpoint(encoding, source, target), None)
            finally:
                lease.release()

    async def _elsewhere(self, encoding: Encoding) -> Encoded:
        """Have the process encode.

        Raises:
            OSError, EndOfStream, IncompleteRead, BrokenResourceError, ValueError: If there is none any more.
        """
        process = self.process
        if process is None:
            process = self.process = await self._started()

        assert process.stdin is not None
        assert process.stdout is not None
        try:
            await process.stdin.send(encoding.told())
            answer = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", _LINE)
        except BaseException:
            await self.close()
            raise

        told = json.loads(answer)
        if "error" in told:
            raise _heard(told["error"])

        return Encoded(int(told["nbytes"]), float(told["processor_s"]))

    async def _started(self) -> Process:
        path = os.pathsep.join(filter(None, sys.path))
        environ = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        started: list[Process] = []
        with CancelScope(shield=True):  # or there might be one that nothing ends
            started.append(
                await anyio.open_process(self._command, stdin=PIPE, stdout=PIPE, stderr=None, env=environ)
            )

        return started[0]

    async def close(self) -> None:
        """End the process; return when it is gone, and has undone what it had begun."""
        process, self.process = self.process, None
        if process is None:
            return

        with CancelScope(shield=True):
            with move_on_after(_UNDOING_S):
                if process.stdin is not None:
                    with suppress(BrokenResourceError, OSError):
                        await process.stdin.aclose()

                await process.wait()

            if process.returncode is None:
                process.kill()

            await process.aclose()


def _told(error: PenstockError) -> dict[str, Any]:
    """Return an error as its reader needs it: what the caller can do about it, and where."""
    told: dict[str, Any] = {"kind": "other", "problem": str(error)}
    if isinstance(error, KeeperLostError):
        told |= {"kind": "keeper", "path": error.path}
    elif isinstance(error, StorageError):
        told |= {"kind": "storage", "path": error.path, "problem": error.problem}
        told |= {"operation": error.operation, "errno": error.errno}
    elif isinstance(error, CorruptCheckpointError):
        is_strange = isinstance(error, UnsupportedFormatError | ExpansionError)
        told |= {"kind": "strange" if is_strange else "damaged", "path": error.path, "problem": error.problem}

    return told


def _heard(told: dict[str, Any]) -> PenstockError:
    kind, problem, path = told["kind"], str(told["problem"]), str(told.get("path", ""))
    if kind == "keeper":
        return KeeperLostError(path, problem)
    if kind == "storage":
        return StorageError(told["operation"], path, problem, told["errno"])
    if kind == "strange":
        return UnsupportedFormatError(path, problem)
    if kind == "damaged":
        return CorruptCheckpointError(path, problem)

    return PenstockError(problem)


async def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Encode what is asked for, until the end of the input; what is under way then is undone."""
    send, receive = anyio.create_memory_object_stream[bytes](1)
    threads, parent = Threads(1).leaving_calls(0.0), os.getppid()
    async with anyio.create_task_group() as tasks, send, receive:

        async def listen() -> None:
            while line := await threads.run(requests.readline):
                await send.send(line)

            tasks.cancel_scope.cancel()

        async def watch() -> None:  # the input stays open as long as a fork of who started this lives
            while True:
                await anyio.sleep(_LOOKS_S)
                if os.getppid() != parent:
                    tasks.cancel_scope.cancel()

        tasks.start_soon(listen)
        tasks.start_soon(watch)
        async for line in receive:
            answer = await _answer(Encoding.heard(line))
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


async def _answer(encoding: Encoding) -> dict[str, Any]:
    began = time.process_time()
    try:
        stores = StoreFinder(None, encoding.config.store)
        source, target = stores.at(encoding.path), stores.at(encoding.destination)
        try:
            nbytes = await encode_checkpoint(encoding, source, target)
        finally:
            await stores.close(Threads(1))
    except PenstockError as error:
        return {"error": _told(error)}
    except Exception as error:  # it must not end, and leave its caller with nothing to say
        return {"error": {"kind": "other", "problem": repr(error)}}

    return {"nbytes": nbytes, "processor_s": time.process_time() - began}


def main() -> int:
    """Serve standard input; return 0 when that has ended."""
    # Whoever ends the training tells its whole group. It ends this one, once its steps are where they go.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)

    with suppress(OSError):
        os.nice(_NICENESS)

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no answer
    with answers:
        anyio.run(_serve, sys.stdin.buffer, answers)

    return 0


if __name__ == "__main__":
    sys.exit(main())
