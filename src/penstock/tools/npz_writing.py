"""Writes a NumPy archive leaf by leaf, within the budget, and publishes it when it is whole."""

from __future__ import annotations

__all__ = (
    "MemberToWrite",
    "NpzWriting",
    "plan_comment",
    "plan_members",
)

import io
import json
import time
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

import numpy as np
from anyio import move_on_after

from penstock.checkpointer.progress import ShownProgress, shown_progress
from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.npz_archive import is_npz
from penstock.handlers.leaves.stored_value import StoredValue, StoredValueHandler
from penstock.handlers.stores.publishing.paths import temporary_path
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import DuplicateNameError, InvalidLeafError, SpecError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.messages.save import Leaf
from penstock.kernel.pipeline.run_context import ShowProgress
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.stores import DataFile, Store
from penstock.kernel.protocols.written import PiecePlan
from penstock.reports.report import SaveReport
from penstock.stages.files import opened
from penstock.stages.pytree.flattening import FlatLeaf, flatten_tree, is_empty

_ARRAY: Final = ".npy"
_HANDLER: Final = StoredValueHandler()
_MOST_NAME_BYTES: Final = 2**16 - 1
_MOST_COMMENT_BYTES: Final = 2**16 - 1
_SAID: Final = 3  # of leaves that are refused


@final
@dataclass(frozen=True, slots=True, eq=False)
class MemberToWrite:
    """One array of an archive."""

    file: str  #: its name in the archive
    head: bytes  #: what comes before the array
    leaf: Leaf | None  #: with the array, whole and in C order; None if `data` is
    data: bytes = b""

    @property
    def array_nbytes(self) -> int:
        """Bytes of the array."""
        return len(self.data) if self.leaf is None else self.leaf.spec.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the member."""
        return len(self.head) + self.array_nbytes


def plan_members(tree: object) -> Sequence[MemberToWrite]:
    """Say what is written for each leaf of a tree of `StoredValue`s and texts.

    Raises:
        InvalidLeafError: If NumPy has no such elements, or a name that no archive can hold.
        DuplicateNameError: If two members would have one name.
        SpecError: If there are None and empty containers; the first are named.
    """
    leaves, _ = flatten_tree(tree)
    empty = [leaf.info for leaf in leaves if is_empty(leaf.value)]
    if empty:
        listed = ", ".join([info.key_path or "the root" for info in empty[:_SAID]])
        more = f" and {len(empty) - _SAID} more" if len(empty) > _SAID else ""
        problem = f"an npz file holds arrays alone, and no None and no empty containers: {listed}{more}"
        raise SpecError(f"{problem}; leave them out, as in rename={{{empty[0].name!r}: None}}")

    _check_names([leaf.info for leaf in leaves])
    return [_member(leaf) for leaf in leaves]


def plan_comment(metadata: Mapping[str, Any] | None) -> bytes:
    """Return the comment of the archive, which holds the metadata.

    Raises:
        SpecError: If it is too long for one, or no JSON.
    """
    try:
        comment = json.dumps(metadata).encode() if metadata else b""
    except (TypeError, ValueError) as error:
        raise SpecError(f"custom_metadata is no JSON: {error}") from error
    if len(comment) > _MOST_COMMENT_BYTES:
        problem = (
            f"the metadata takes {len(comment)} bytes, and an npz file has room for {_MOST_COMMENT_BYTES}"
        )
        raise SpecError(problem)

    return comment


def _check_names(infos: Sequence[ParamInfo]) -> None:
    """Refuse names that a zip archive cannot hold, or that `numpy.load` would take for one another."""
    known = {info.name: info.key_path for info in infos}
    for info in infos:
        if "\0" in info.name:
            raise InvalidLeafError(
                info.key_path, "its name has a zero byte, where a zip archive would cut it"
            )
        if len((info.name + _ARRAY).encode()) > _MOST_NAME_BYTES:
            raise InvalidLeafError(info.key_path, "its name is too long for a zip archive")
        if info.name + _ARRAY in known:  # numpy takes `a.npy` for `a`, too
            raise DuplicateNameError(info.name + _ARRAY, info.key_path, known[info.name + _ARRAY])


def _member(leaf: FlatLeaf) -> MemberToWrite:
    info, value = leaf.info, leaf.value
    file = info.name + _ARRAY
    if isinstance(value, str):
        text = np.array(value)
        if text[()] != value:
            raise InvalidLeafError(info.key_path, "ends with zero characters, which numpy cuts off")

        return MemberToWrite(file, _head(text.dtype, ()), None, text.tobytes())

    assert isinstance(value, StoredValue), "a tree of a conversion holds nothing else"
    (spec,) = _HANDLER.describe([value], [info], {})
    _check(info, spec)
    shape = spec.shape or ()
    whole = replace(spec, chunk_shape=tuple([n or 1 for n in shape]), write_shape=None, codec=None)
    head = _head(numpy_dtype(spec.dtype), shape)
    return MemberToWrite(file, head, Leaf(0, info, value, whole, _HANDLER))


def _check(info: ParamInfo, spec: LeafSpec) -> None:
    dtype = numpy_dtype(spec.dtype)
    if spec.extended_dtype is not None:
        problem = f"is an array of PRNG keys ({spec.extended_dtype}), which an npz file cannot say"
        problem += f"; leave it out, as in rename={{{info.name!r}: None}}"
        raise InvalidLeafError(info.key_path, problem)
    if dtype.isbuiltin != 1:
        other = "int8" if "int" in spec.dtype else "float32"
        problem = f"numpy has no elements of type {spec.dtype}; cast it, as in dtype={other!r}"
        raise InvalidLeafError(info.key_path, problem)


def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    head = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, about)
    return head.getvalue()


_FILE: Final = "arrays.npz"
_TOGETHER: Final = 256
"""Small arrays written by one call of a thread."""
_CLEANING_S: Final = 60.0


@final
@dataclass(frozen=True, slots=True)
class NpzWriting:
    """Writes archives into a store.

    Args:
        store: Where they are.
        threads: For all that blocks.
        memory: The budget.
        piece_bytes: Of a large array, how much is held at once; a chunk with a codec cannot be cut.
        overwrite: Replace an archive that is there.
        progress: As for `Checkpointer.save`.
    """

    store: Store
    threads: Threads
    memory: MemoryRegulator
    piece_bytes: int
    overwrite: bool
    progress: ShowProgress = False

    async def save(
        self,
        final: str,
        members: Sequence[MemberToWrite],
        comment: bytes,
        before: Callable[[], Awaitable[object]],
    ) -> SaveReport:
        """Write an archive, and publish it at `final` if `before` does not raise.

        Raises:
            PenstockError: If a leaf cannot be read, or the medium refuses.

        Cancellation:
            Nothing is left at `final` or next to it.
        """
        started = time.perf_counter()
        recognises = partial(is_npz, self.store)
        workspace = Workspace(
            self.store, self.threads, final, temporary_path(final),
            overwrite=self.overwrite, recognises=recognises, file=_FILE,
        )  # fmt: skip
        try:
            await workspace.open()
            with ExitStack() as stack:
                stack.enter_context(self.memory.used())
                shown = shown_progress(self.progress)
                if shown is not None:
                    stack.enter_context(shown.observing("save", final))

                await self._write(workspace.path(_FILE), members, comment, shown)

            await before()
            await workspace.publish()
        except BaseException:
            with move_on_after(_CLEANING_S, shield=True):
                await workspace.discard()

            raise
        finally:
            workspace.release()

        elapsed_s = time.perf_counter() - started
        return SaveReport(
            final,
            len(members),
            sum([member.leaf.spec.nbytes for member in members if member.leaf is not None]),
            staged_s=elapsed_s,
            durable_s=elapsed_s,
            peak_leased_bytes=self.memory.peak,
        )

    async def _write(
        self, path: str, members: Sequence[MemberToWrite], comment: bytes, shown: ShownProgress | None
    ) -> None:
        done, total = 0, sum([member.array_nbytes for member in members])

        def wrote(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if shown is not None:
                shown(done, total)

        async with opened(self.threads, lambda: self.store.create_data_file(path)) as file:
            archive = _Archive(file)
            try:
                for group in _groups(members, self.piece_bytes):
                    plans = await self.threads.run(_plan, group, self.piece_bytes)
                    if len(group) == 1:
                        await self._write_large(archive, group[0], plans[0], wrote)
                    else:
                        await self._within(sum(map(_cost, plans)), archive.write_whole, group, plans)
                        wrote(sum([member.array_nbytes for member in group]))

                await self.threads.run(archive.end, comment)
            finally:
                archive.close()

    async def _write_large(
        self,
        archive: _Archive,
        member: MemberToWrite,
        plans: Sequence[PiecePlan],
        wrote: Callable[[int], object],
    ) -> None:
        await self.threads.run(archive.begin, member)
        for plan in plans:
            await self._within(plan.cost, archive.write, plan)
            wrote(plan.nbytes)

        await self.threads.run(archive.end_member)

    async def _within(self, cost: int, function: Callable[..., object], *args: object) -> None:
        lease = await self.memory.acquire(cost, admit_oversize=True, flow="save")
        try:
            await self.threads.run(function, *args)
        finally:
            lease.release()


def _groups(members: Iterable[MemberToWrite], most_bytes: int) -> Iterator[list[MemberToWrite]]:
    """Put small members together. A larger one is alone."""
    group: list[MemberToWrite] = []
    nbytes = 0
    for member in members:
        if group and (nbytes + member.array_nbytes > most_bytes or len(group) == _TOGETHER):
            yield group
            group, nbytes = [], 0

        group.append(member)
        nbytes += member.array_nbytes

    if group:
        yield group


def _plan(group: Sequence[MemberToWrite], piece_bytes: int) -> list[list[PiecePlan]]:
    """Plan the pieces of each array, in the order of its bytes: it is one chunk."""
    return [
        [] if member.leaf is None else list(member.leaf.handler.pieces(member.leaf, piece_bytes))
        for member in group
    ]


def _cost(plans: Iterable[PiecePlan]) -> int:
    return sum([plan.cost for plan in plans])


@final
class _Archive:
    """A zip archive that is being written into a file of a store. Blocking, but for `close`."""

    __slots__ = ("_file", "_member", "_sink", "_zip")

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._sink = _Sink(file)
        self._zip = zipfile.ZipFile(self._sink, "w", zipfile.ZIP_STORED)
        self._member: Any = None

    def begin(self, member: MemberToWrite) -> None:
        """Begin a member, whose array is written next."""
        info = zipfile.ZipInfo(member.file)  # of 1980: equal trees make equal files
        info.file_size = member.nbytes  # so that zipfile knows which header it needs
        self._member = self._zip.open(info, "w")
        self._member.write(member.head)
        self._member.write(member.data)

    def write(self, plan: PiecePlan) -> None:
        """Write the next piece of the array."""
        self._member.write(plan.take())

    def end_member(self) -> None:
        """Complete the member."""
        self._member.close()

    def write_whole(self, group: Sequence[MemberToWrite], plans: Sequence[Sequence[PiecePlan]]) -> None:
        """Write whole members."""
        for member, pieces in zip(group, plans, strict=True):
            self.begin(member)
            for plan in pieces:
                self.write(plan)

            self.end_member()

    def end(self, comment: bytes) -> None:
        """Write the directory, and make the file durable."""
        self._zip.comment = comment
        self._zip.close()
        self._file.sync()

    def close(self) -> None:
        """Write no more. Idempotent."""
        self._sink.is_discarded = True  # `zipfile` completes what it is writing even when it is collected
        if self._member is not None:
            self._member.close()

        self._zip.close()


@final
class _Sink(io.RawIOBase):
    """A new file of a store as `zipfile` wants it."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._at = 0
        self._end = 0
        self.is_discarded = False  #: whether all that comes is dropped

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        return self._at

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        if not self.is_discarded:
            self._file.write_at(self._at, [view])

        self._at += len(view)
        self._end = max(self._end, self._at)
        return len(view)
