"""Programs that end with a save in flight, each in a process of its own: `ending.py WHICH FOLDER`.

Without arguments it waits for lines of WHICH, FOLDER and where to write, and runs each in a fork: imports
take longer than such a program does. To each line it answers with the process, and then with its exit status.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import uvloop

import penstock
from penstock import SaveFuture
from penstock.config import Config, StoppingOptions
from penstock.errors import ForkedError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.directory_lock import DirectoryHold
from penstock.testing import FaultyStore, Hang

TREE = {"a": np.arange(1000), "step": 7}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def hanging(then: Exception | None = None, **stopping: Any) -> tuple[Hang, dict[str, Any]]:
    """A save that hangs in its first write, and what a Checkpointer needs for that."""
    store = FaultyStore(LocalStore())
    config = Config(stopping=StoppingOptions(**stopping))
    return store.hang_on("data.write_at", then=then), {"store": store, "config": config}


@contextmanager
def awaited_signals() -> Generator[Callable[[], object]]:
    """Yield what returns once another signal has come, and its handler been called.

    Unlike `signal.pause`, it also does for one that came just before it was called.
    """
    came, note = os.pipe()
    os.set_blocking(note, False)
    previous = signal.set_wakeup_fd(note)
    try:
        yield lambda: os.read(came, 1)
    finally:
        signal.set_wakeup_fd(previous)


def when_main_has_ended(act: Callable[[], object]) -> None:
    def wait() -> None:
        threading.main_thread().join()
        act()

    threading.Thread(target=wait).start()


# The interpreter's exit


def left_open(folder: Path, *, hangs: bool, then: Exception | None = None, **stopping: Any) -> None:
    """Never leave the Checkpointer."""
    hang, options = hanging(then, **stopping)
    checkpointer = penstock.sync.Checkpointer(**options)
    checkpointer.__enter__()
    checkpointer.save(folder / "new", TREE)
    hang.wait_reached_blocking()
    globals()["left"] = checkpointer  # to be found by the interpreter when it clears its modules
    if not hangs:
        when_main_has_ended(hang.release)


def drained(folder: Path) -> None:
    left_open(folder, hangs=False)


def abandoned(folder: Path) -> None:
    left_open(folder, hangs=True, at_exit="abandon")


def drained_in_vain(folder: Path) -> None:
    left_open(folder, hangs=True, at_exit_s=0.5)


def failed_at_exit(folder: Path) -> None:
    left_open(folder, hangs=False, then=StorageError("write", "x", "no room"))


def idle(folder: Path) -> None:
    globals()["left"] = penstock.sync.Checkpointer()
    globals()["left"].__enter__()
    globals()["left"].save(folder / "new", TREE).result()


def drained_thread(folder: Path, backend: str) -> None:
    """An event loop in a daemon thread, which nobody waits for."""
    hang, options = hanging()
    begun = threading.Event()

    async def main() -> None:
        async with penstock.Checkpointer(**options) as checkpointer:
            await checkpointer.save(folder / "new", TREE)
            await hang.wait_reached()
            begun.set()
            await anyio.sleep_forever()

    threading.Thread(target=lambda: anyio.run(main, backend=backend), daemon=True).start()
    begun.wait()
    when_main_has_ended(hang.release)


def drained_asyncio(folder: Path) -> None:
    drained_thread(folder, "asyncio")


def drained_trio(folder: Path) -> None:
    drained_thread(folder, "trio")


def dead_loop(folder: Path) -> None:
    """A loop of the main thread that stands still, as a notebook's does at its end."""
    hang, options = hanging()
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        checkpointer = penstock.Checkpointer(**options)
        await checkpointer.__aenter__()
        globals()["left"] = checkpointer, await checkpointer.save(folder / "new", TREE)
        await hang.wait_reached()

    loop.run_until_complete(begin())
    hang.release()


# Event loops that end in the middle of a save


async def overwriting(folder: Path, end: Callable[[], object]) -> None:
    """Save over an earlier checkpoint; end the loop while an array is being written."""
    hang, options = hanging()
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(folder / "new", TREE))

    async with penstock.Checkpointer(**options) as checkpointer:
        save = await checkpointer.save(folder / "new", {**TREE, "step": 8}, overwrite=True)
        threading.Thread(target=lambda: say(f"told: {type(save_error(save)).__name__}")).start()
        await hang.wait_reached()
        threading.Timer(0.2, hang.release).start()  # by then the loop has ended
        end()
        await anyio.sleep_forever()


def save_error(save: SaveFuture) -> Exception | None:
    try:
        save.result()
    except Exception as error:
        return error

    return None


def stopped(folder: Path, loop: asyncio.AbstractEventLoop) -> None:
    globals()["task"] = loop.create_task(overwriting(folder, loop.stop))
    loop.run_forever()
    loop.close()


def stopped_asyncio(folder: Path) -> None:
    stopped(folder, asyncio.new_event_loop())


def stopped_uvloop(folder: Path) -> None:
    stopped(folder, uvloop.new_event_loop())


def stopped_and_left_open(folder: Path) -> None:
    globals()["loop"] = loop = asyncio.new_event_loop()
    globals()["task"] = loop.create_task(overwriting(folder, loop.stop))
    loop.run_forever()


def main_raises(folder: Path) -> None:
    def fail() -> None:
        raise KeyError("main")

    with suppress(KeyError):
        asyncio.run(overwriting(folder, fail))


def main_interrupted(folder: Path) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(overwriting(folder, lambda: os.kill(os.getpid(), signal.SIGINT)))


def exits_in_a_callback(folder: Path) -> None:
    with suppress(SystemExit):
        asyncio.run(overwriting(folder, lambda: asyncio.get_running_loop().call_soon(sys.exit, 3)))


# Signals


async def training(folder: Path, release: bool, **stopping: Any) -> None:
    hang, options = hanging(**stopping)
    async with penstock.Checkpointer(**options) as checkpointer:
        await checkpointer.save(folder / "new", TREE)
        await hang.wait_reached()
        say("saving")
        while not checkpointer.stopping.sigterm_came:
            await anyio.sleep(0.01)

        say("came")
        if release:
            hang.release()

        await anyio.sleep_forever()


def sigterm_asyncio(folder: Path) -> None:
    anyio.run(lambda: training(folder, True, sigterm_s=20.0))


def sigterm_trio(folder: Path) -> None:
    anyio.run(lambda: training(folder, True, sigterm_s=20.0), backend="trio")


def sigterm_in_vain(folder: Path) -> None:
    anyio.run(lambda: training(folder, False, sigterm_s=0.2))


def sigterm_twice(folder: Path) -> None:
    anyio.run(lambda: training(folder, False, sigterm_s=20.0))


def sigterm_not_held(folder: Path) -> None:
    anyio.run(lambda: training(folder, False))


def sigterm_own_handler(folder: Path) -> None:
    def handle(*_: object) -> None:
        say("handled")
        os._exit(7)

    signal.signal(signal.SIGTERM, handle)
    sigterm_asyncio(folder)


def sigterm_sync(folder: Path) -> None:
    hang, options = hanging(sigterm_s=20.0)
    checkpointer = penstock.sync.Checkpointer(**options)
    with checkpointer, awaited_signals() as wait_signal:
        checkpointer.save(folder / "new", TREE)
        hang.wait_reached_blocking()
        say("saving")
        wait_signal()
        assert checkpointer._inner.stopping.sigterm_came
        hang.release()
        while True:
            wait_signal()


def sigterm_idle(folder: Path) -> None:
    async def main() -> None:
        config = Config(stopping=StoppingOptions(sigterm_s=20.0))
        async with penstock.Checkpointer(config=config) as checkpointer:
            await (await checkpointer.save(folder / "new", TREE))
            say("saving")
            await anyio.sleep_forever()

    anyio.run(main)


async def interrupted(folder: Path) -> None:
    hang, options = hanging()
    async with penstock.Checkpointer(**options) as checkpointer:
        await checkpointer.save(folder / "new", TREE)
        await hang.wait_reached()
        try:
            say("saving")  # the signal comes at once
            await anyio.sleep_forever()
        finally:
            hang.release()


def sigint_asyncio(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    anyio.run(interrupted, folder)


def sigint_trio(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    anyio.run(interrupted, folder, backend="trio")


def sigint_sync(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hang, options = hanging()
    with awaited_signals() as wait_signal, penstock.sync.Checkpointer(**options) as checkpointer:
        checkpointer.save(folder / "new", TREE)
        hang.wait_reached_blocking()
        try:
            say("saving")  # the signal comes at once
            while True:
                wait_signal()
        finally:
            hang.release()


# Forks


def forked(folder: Path) -> None:
    """The child cannot use its parent's Checkpointer or saves, and can use penstock."""
    hang, options = hanging()
    with penstock.sync.Checkpointer(**options) as checkpointer:
        save = checkpointer.save(folder / "parent", TREE)
        child = os.fork()
        if not child:
            for call in (lambda: checkpointer.save(folder / "x", TREE), save.result, save.cancel):
                try:
                    call()
                except ForkedError as error:
                    say(f"refused: {error}")

            penstock.sync.save(folder / "new", TREE)
            assert penstock.sync.restore(folder / "new")["step"] == 7
            sys.exit(3)  # through the `with`, and all that the interpreter does at its end

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        hang.release()
        save.result()


def forked_async(folder: Path) -> None:
    """The same in a coroutine."""

    async def main() -> None:
        async with penstock.Checkpointer() as checkpointer:
            await (await checkpointer.save(folder / "new", TREE))
            child = os.fork()
            if not child:
                try:
                    await checkpointer.restore(folder / "new")
                except ForkedError:
                    os._exit(3)

                os._exit(1)

            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            await checkpointer.restore(folder / "new")

    anyio.run(main)


def forked_hold(folder: Path) -> None:
    """A fork neither keeps what its parent gives up nor gives up what its parent keeps."""
    (folder / "new").mkdir()
    hold = DirectoryHold(str(folder / "new"))
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if not child:
        os.close(from_parent)
        del hold
        os.write(from_child, b".")
        os.read(to_child, 1)
        os._exit(0)

    os.read(to_parent, 1)
    try:
        DirectoryHold(str(folder / "new"))
    except StorageError:
        say("still held")

    again = os.fork()
    if not again:
        os.close(from_parent)
        os.read(to_child, 1)
        os._exit(0)

    hold.release()
    DirectoryHold(str(folder / "new")).release()
    say("given up")
    os.close(from_parent)
    for each in (child, again):
        os.waitpid(each, 0)


def asked() -> tuple[str, str]:
    """Fork for each line of stdin. Return in each fork, with what it is to run."""
    anyio.run(penstock.warm_up)
    for line in sys.stdin:
        which, folder, out, err = line.split()
        process = os.fork()
        if not process:
            for name, descriptor in ((out, 1), (err, 2)):
                os.dup2(os.open(name, os.O_WRONLY), descriptor)

            return which, folder

        say(str(process))
        say(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))

    sys.exit()


if __name__ == "__main__":
    name, place = sys.argv[1:] or asked()
    globals()[name](Path(place))
    say("main ends")
