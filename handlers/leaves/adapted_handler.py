"""Adapts a third-party `TypeHandler`, which knows nothing of pieces and streams, to a `LeafHandler`."""

from __future__ import annotations

__all__ = ("AdaptedHandler",)

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never, final

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import HandlerFailedError, PenstockError, PipelineError, TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredRows
from penstock.kernel.protocols.leaf_handlers import (
    Background,
    EveryProcess,
    Leaf,
    ReadLeaf,
    ReadLeaves,
    TypeHandler,
    Waitable,
)
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.written import PiecePlan


@final
@dataclass(frozen=True, slots=True)
class AdaptedHandler:
    """A batch-level `TypeHandler` as a `LeafHandler` that keeps its own files (a `FilesHandler`).

    Its values are staged when its `serialize` returns, under a lease of what its `memory_size`
    says. They are written when every future it returned is done.

    Its exceptions become `HandlerFailedError`s with the original as the cause.
    """

    inner: TypeHandler

    @property
    def name(self) -> str:
        """The handler's class, for messages."""
        kind: type = getattr(self.inner, "handler_class", type(self.inner))
        return f"{kind.__module__}.{kind.__qualname__}"

    @property
    def every_process(self) -> bool:
        """True if `inner` says that each process writes a part of a leaf that all hold."""
        return isinstance(self.inner, EveryProcess) and self.inner.every_process

    @property
    def typestr(self) -> str:
        """The type name that `_METADATA` records."""
        return self.inner.typestr()

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        """Return specs without shape or chunks: the handler stores the leaves itself."""
        with self._blame(infos[0].key_path):
            return [LeafSpec(self.typestr)] * len(values)

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        """Refuse: the leaf does not travel in pieces.

        Raises:
            PipelineError: Always.
        """
        self._refuse(leaf.info)

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        """Return targets without regions: the handler reads the leaves. Another type is a difference."""
        typestr = self.typestr
        targets: list[Target | TreeDifference] = []
        for at, on_disk in enumerate(stored.specs):
            like = None if likes is None else likes[at]
            if on_disk.typestr == typestr:
                targets.append(Target(detail=like))
                continue

            kind: type = like if isinstance(like, type) else type(like)
            text = on_disk.typestr if on_disk.shape is None else f"{on_disk.dtype}{list(on_disk.shape)}"
            targets.append(TreeDifference("type", stored[at].info.key_path, kind.__name__, text))

        return targets

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        """Refuse: the handler reads values itself.

        Raises:
            PipelineError: Always.
        """
        self._refuse(leaves[0].info)

    def write_size(self, leaves: Sequence[Leaf]) -> int:
        """Host bytes that saving the leaves together holds."""
        with self._blame(_names(leaves)):
            sizes = self.inner.memory_size([leaf.value for leaf in leaves])
            return sum([nbytes for nbytes, _ in _one_for_each(leaves, sizes)])

    def read_sizes(self, leaves: Sequence[ReadLeaf]) -> Sequence[int | None]:
        """Host bytes that restoring each leaf holds; None where that is not known beforehand.

        `memory_size` was promised values, so nothing is known without a concrete `like`.
        """
        likes = [leaf.target.detail for leaf in leaves]
        concrete = [like is not None and not isinstance(like, type) for like in likes]
        values = [like for like, is_value in zip(likes, concrete, strict=True) if is_value]
        try:
            known = iter([nbytes for _, nbytes in self.inner.memory_size(values)] if values else [])
            return [next(known) if is_value else None for is_value in concrete]
        except Exception:  # an abstract target
            return [None] * len(leaves)

    async def save(self, leaves: Sequence[Leaf], threads: Threads, place: object = None) -> Background:
        """Have the leaves copied, in one call of `serialize`; see `FilesHandler.save`.

        Raises:
            HandlerFailedError: If the handler raised. What its futures raise, the wait raises.
        """
        names = _names(leaves)
        with self._blame(names):
            futures = await self.inner.serialize(
                [leaf.value for leaf in leaves], [leaf.info for leaf in leaves]
            )

        written = threads.call_once(_wait_all, futures, place)

        async def wait() -> None:
            with self._blame(names):
                await written()

        return Background(names, self.name, "what it writes in the background", wait, written.when_over)

    async def load(self, leaves: Sequence[ReadLeaf]) -> Sequence[Any]:
        """Read the values of the leaves, in one call of `deserialize`.

        Raises:
            HandlerFailedError: If the handler raised, or returned too few or too many values.
        """
        with self._blame(_names(leaves)):
            return _one_for_each(leaves, await self.inner.deserialize([leaf.info for leaf in leaves]))

    def finalizing(self, directory: str, threads: Threads, place: object = None) -> Background:
        """Return the call in which the handler completes its files; see `FilesHandler.finalizing`."""
        wanted = True

        def finalize(_: object) -> None:
            if wanted:
                self.inner.finalize(directory)

        call = threads.call_once(finalize, place)
        what = f"finalize of {self.typestr!r}"

        async def wait() -> None:
            nonlocal wanted
            try:
                with self._blame(what, is_leaf=False):
                    await call()
            except BaseException:
                wanted = False
                raise

        return Background(what, self.name, "its finalize", wait, call.when_over)

    def _refuse(self, info: ParamInfo) -> Never:
        raise PipelineError(
            f"{info.key_path}: {self.name} keeps files of its own, but a stage took its leaf out of the "
            "LeafBatch that names it (LeafBatch.handler)"
        )

    @contextmanager
    def _blame(self, what: str, *, is_leaf: bool = True) -> Generator[None]:
        """Translate the handler's exceptions; `what` names the call."""
        try:
            yield
        except PenstockError as error:
            if error.key_path is None and is_leaf:
                error.key_path = what
            raise
        except Exception as error:
            raise HandlerFailedError(what, self.name, f"{type(error).__name__}: {error}") from error


def _names(leaves: Sequence[Leaf] | Sequence[ReadLeaf]) -> str:
    """Name the leaves of a batch: only the handler knows which of them failed."""
    first = leaves[0].info.key_path
    return first if len(leaves) == 1 else f"{first} and {len(leaves) - 1} more"


def _one_for_each(leaves: Sequence[object], found: Sequence[Any]) -> Sequence[Any]:
    if len(found) != len(leaves):
        results = "1 result" if len(found) == 1 else f"{len(found):,} results"
        given = "1 leaf" if len(leaves) == 1 else f"{len(leaves):,} leaves"
        raise ValueError(f"it returned {results} for {given}")

    return found


def _wait_all(futures: Sequence[Waitable], _: object) -> None:
    """Wait for every future, even after one has failed: none may write into a removed directory."""
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
