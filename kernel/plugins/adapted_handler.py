"""Makes a stage worker of a third party's `TypeHandler`, which knows nothing of pieces and streams."""

from __future__ import annotations

__all__ = ("AdaptedHandler",)

from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import HandlerFailedError, PenstockError
from penstock.kernel.messages.restore import ReadLeaf
from penstock.kernel.messages.save import Background, Leaf, Pending
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import TypeHandler, Waitable
from penstock.kernel.protocols.reads import Target


@final
@dataclass(frozen=True, slots=True)
class AdaptedHandler:
    """A batch-level `TypeHandler` in the pipeline: it writes and reads files of its own.

    Its values are staged when its `serialize` returns, under a lease of what its `memory_size`
    says; they are written when every future it returned is done.
    """

    inner: TypeHandler

    @property
    def name(self) -> str:
        """The handler's class, for messages."""
        kind: type = getattr(self.inner, "handler_class", type(self.inner))
        return f"{kind.__module__}.{kind.__qualname__}"

    @property
    def typestr(self) -> str:
        """The type name that `_METADATA` records."""
        return self.inner.typestr()

    def describe(self, value: Any, info: ParamInfo) -> LeafSpec:
        """Say that the leaf is stored by somebody else: no shape, no chunks."""
        with self._blame(info):
            return LeafSpec(self.typestr)

    def write_size(self, leaf: Leaf) -> int:
        """Host bytes that saving the leaf holds."""
        with self._blame(leaf.info):
            return self.inner.memory_size([leaf.value])[0][0]

    def target(self, like: object, piece_bytes: int) -> Target:
        """Say what restoring a leaf holds on the host; if that cannot be told, as much as one piece.

        `memory_size` was promised a value, so nothing is known without a concrete `like`.
        """
        if like is None or isinstance(like, type):
            return Target(staging_bytes=piece_bytes)
        try:
            nbytes = self.inner.memory_size([like])[0][1]
        except Exception:  # an abstract target
            nbytes = piece_bytes

        return Target(staging_bytes=nbytes)

    async def save(self, leaf: Leaf, threads: Threads, place: object = None) -> Pending:
        """Have the leaf copied. The `Pending` waits for its background work.

        Nobody can interrupt that work. A wait for it can be cancelled, and the work goes on.

        Args:
            leaf: To be saved.
            threads: For the wait.
            place: What it writes to: kept alive, and so held, as long as a wait for the work goes on
                in a thread, be it awaited or not.

        Raises:
            HandlerFailedError: If the handler raised, here or in a future; its error is the cause.
        """
        info = leaf.info
        with self._blame(info):
            futures = await self.inner.serialize([leaf.value], [info])

        written = threads.call_once(_wait_all, futures, place)

        async def wait() -> None:
            with self._blame(info):
                await written()

        return Pending(leaf.without_value(), wait, self.name)

    async def load(self, leaf: ReadLeaf) -> Any:
        """Read the leaf's value.

        Raises:
            HandlerFailedError: If the handler raised; its error is the cause.
        """
        with self._blame(leaf.info):
            return (await self.inner.deserialize([leaf.info]))[0]

    def finalizing(self, directory: str, threads: Threads, place: object = None) -> Background:
        """Let the handler complete its files before the commit, once the result is first waited for.

        Nobody can interrupt it. A wait for it can be cancelled, and it goes on; if it has not begun by
        then, it never does.

        Args:
            directory: Where its files are.
            threads: For the call.
            place: As for `save`.
        """
        wanted = True

        def finalize(_: object) -> None:
            if wanted:
                self.inner.finalize(directory)

        call = threads.call_once(finalize, place)

        async def wait() -> None:
            nonlocal wanted
            try:
                with self._blame(None):
                    await call()
            except BaseException:
                wanted = False
                raise

        return Background(self._finalize_of, self.name, "its finalize", wait)

    @property
    def _finalize_of(self) -> str:
        return f"finalize of {self.typestr!r}"

    @contextmanager
    def _blame(self, info: ParamInfo | None) -> Generator[None]:
        try:
            yield
        except PenstockError as error:
            if error.key_path is None and info is not None:
                error.key_path = info.key_path
            raise
        except Exception as error:
            key_path = info.key_path if info is not None else self._finalize_of
            raise HandlerFailedError(key_path, self.name, f"{type(error).__name__}: {error}") from error


def _wait_all(futures: Sequence[Waitable], _: object) -> None:
    """Wait for every future, also after one failed: none may write into a directory that is removed."""
    first: Exception | None = None
    for future in futures:
        try:
            future.result()
        except BaseException as error:
            # TensorStore's asyncio.CancelledError would pass for a cancellation of the save.
            first = first or (
                error if isinstance(error, Exception) else CancelledError("a future was cancelled")
            )

    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback refers to this frame
