"""Arrays of type handlers that are called directly: a pipeline of one batch, whose medium is TensorStore.

A call is one save or one restore of penstock's engine. Its stages lease memory, copy from devices and to
them, cast and resize, as for any checkpoint. The stages that differ stand here, because programs override
where and how such handlers store an array: by TensorStore's spec. A save writes by these specs in one
transaction; a restore reads by them, once the checksums that are recorded have been compared.
"""

from __future__ import annotations

__all__ = (
    "ArrayToRead",
    "ArrayToWrite",
    "ReplicaOptions",
    "begin_writing",
    "check_infos",
    "leaf_to_write",
    "open_arrays",
    "opened_metadata",
    "read_arrays",
    "read_values",
    "sharding_pointer",
    "target_of",
    "write_shape_of",
    "write_values",
)

import math
import os
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast, final

import jax
import numpy as np
import tensorstore as ts
from anyio import CancelScope
from anyio.lowlevel import checkpoint_if_cancelled

from penstock import Checkpointer, Pipeline, SaveFuture, kernel, pipelines
from penstock import handlers as built_in
from penstock.embedding import TreeDirectory, blocking, check_arrays, chunk_shapes, dtypes, prng_keys
from penstock.errors import DuplicateNameError
from penstock.orbax.future import in_thread
from penstock.orbax.item_files import check_document
from penstock.orbax.leaf_args import ParamInfo, RestoreArgs
from penstock.orbax.serialization import get_ts_context, json_spec
from penstock.orbax.value_metadata import ArrayMetadata, ShardingMetadata, StorageMetadata, ZarrMetadata

_ts: Any = ts  # its stubs use names that they do not define
_jax: Any = jax


def check_infos(infos: Sequence[ParamInfo]) -> None:
    """Refuse leaves that would be stored in one place, and a mix of databases and directories.

    Raises:
        DuplicateNameError: If two have one name; Orbax would lose one of them.
        ValueError: If only some of them go to a database.
    """
    if len({info.is_ocdbt_checkpoint for info in infos}) > 1:
        raise ValueError("is_ocdbt_checkpoint is the same for all leaves that are handled together")

    seen: dict[tuple[str, str], ParamInfo] = {}
    for info in infos:
        place = _directory_of(info), info.name
        if place in seen:
            raise DuplicateNameError(info.name, _key_path(seen[place]), _key_path(info))

        seen[place] = info


def _directory_of(info: ParamInfo) -> str:
    return str(vars(info)["_parent_dir"])  # it may not exist yet


def _name_of_run(info: ParamInfo) -> str:
    """Return the path that a batch is known by. It may be of a bucket, which TensorStore alone opens."""
    return os.path.abspath(_directory_of(info))


def _key_path(info: ParamInfo) -> str:
    return info.name if info.keypath is None else "".join(map(str, info.keypath))


@final
@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The options of `ArrayHandler` for replicas that share the work of writing.

    Source:
        ORBAX_FORMAT.md §2.1.
    """

    parallel: bool = True  #: whether each replica of a shard writes a part of it
    min_slice_bytes: int | None = None  #: bytes of a part below which the shard is not divided
    max_replicas: int | None = None  #: the most parts that it is divided into
    separate_folder: bool = False  #: whether replicated arrays have a database of their own

    def part_of(self, shard: tuple[int, ...], n_replicas: int, itemsize: int) -> tuple[int, ...] | None:
        """Return the shape of the part of a shard that each replica writes; None if one writes all of it."""
        if self.max_replicas is not None:
            n_replicas = min(n_replicas, self.max_replicas)
        if not self.parallel or n_replicas <= 1:
            return None

        part = chunk_shapes.replica_shape(shard, n_replicas)
        too_small = part is not None and math.prod(part) * itemsize < (self.min_slice_bytes or 0)
        return None if too_small else part


def write_shape_of(value: Any, options: ReplicaOptions) -> tuple[int, ...]:
    """Return the shape of what one replica writes of a jax.Array: a shard, or a part of it."""
    shape = tuple(value.sharding.shard_shape(value.shape))
    indices: Any = value.sharding.addressable_devices_indices_map(value.shape)
    n_replicas = min(Counter(map(str, indices.values())).values())
    return options.part_of(shape, n_replicas, value.dtype.itemsize) or shape


@final
@dataclass(frozen=True, slots=True)
class ArrayToWrite:
    """One array of a batch."""

    info: ParamInfo
    leaf: kernel.Leaf  #: what the stages of a save know of it
    spec: Callable[[], dict[str, Any]]  #: makes TensorStore's spec, once there is a directory


def leaf_to_write(
    value: Any, info: ParamInfo, handler: kernel.LeafHandler, dtype: Any, part: Callable[[], tuple[int, ...]]
) -> kernel.Leaf:
    """Return an array as a leaf, which travels in parts.

    Args:
        value: The array.
        info: Of the leaf.
        handler: Penstock's own for such values.
        dtype: What it is stored as; None for its own.
        part: Returns the shape of a part: it divides the array. Called if the value can be stored.

    Raises:
        DeletedLeafError: If it is gone.
        InvalidLeafError: If it cannot be stored.
    """
    place = kernel.ParamInfo((info.name,), (kernel.KeyKind.MAPPING,), info.name)
    (spec,) = handler.describe([value], [place], {})
    if dtype is not None:
        spec = replace(spec, dtype=dtypes.dtype_name(np.dtype(dtype)), itemsize=np.dtype(dtype).itemsize)

    return kernel.Leaf(0, place, value, replace(spec, chunk_shape=part()), handler)


async def begin_writing(
    arrays: Sequence[ArrayToWrite], then: Callable[[], Awaitable[None]]
) -> kernel.Waitable:
    """Begin to write a batch; return once it is copied, and may change.

    Args:
        arrays: What goes where.
        then: Called when they are durable.

    Returns:
        What is done when `then` has returned.

    Raises:
        Exception: What went wrong until then.

    Cancellation:
        Delivered once the batch is copied; what is written of it ends first.
    """
    staged: Future[SaveFuture] = Future()
    call = blocking.start_loop(_write, list(arrays), staged, then, name="penstock: arrays of a handler")
    del arrays  # they hold the caller's values
    with CancelScope(shield=True):
        await blocking.await_future(staged)
    try:
        await checkpoint_if_cancelled()
    except BaseException:
        staged.result().cancel()
        with CancelScope(shield=True), suppress(Exception):
            await blocking.await_future(call)
        raise

    return call


def _own_checkpointer() -> Checkpointer:
    """Return an engine for a directory of the caller, in which other programs may work, too."""
    layout = built_in.OrbaxLayout(directory=TreeDirectory())
    return Checkpointer(layout=layout, coordinator=kernel.SingleProcessCoordinator())


async def _write(
    arrays: list[ArrayToWrite], staged: Future[SaveFuture], then: Callable[[], Awaitable[None]]
) -> None:
    path = _name_of_run(arrays[0].info)
    leaves = [replace(array.leaf, index=at) for at, array in enumerate(arrays)]
    writer = _WriteBySpecs([(array.info, array.spec) for array in arrays])
    arrays.clear()
    try:
        async with _own_checkpointer() as checkpointer:
            save = await checkpointer.save(path, leaves, pipeline=_save_of(writer))
            leaves.clear()
            staged.set_result(save)
            await save
    except Exception as error:
        if staged.done():
            raise

        staged.set_exception(error)
        return

    await then()


def _save_of(writer: _WriteBySpecs) -> Pipeline[kernel.SaveRun]:
    """Return the pipeline of a save of one batch: its own ends, and the copying and publishing stages."""
    usual = pipelines.save_pipeline().replace("flatten", _TakeLeaves()).replace("write", writer)
    return usual.without("prioritise").without("limit_bytes").without("commit")


@final
@dataclass(frozen=True, slots=True)
class _TakeLeaves:
    """Takes the leaves of a batch, which its caller has described."""

    messages: ClassVar[kernel.Messages] = {kernel.TreeToSave: kernel.LeafBatch}

    @asynccontextmanager
    async def open(self, run: kernel.SaveRun, /) -> AsyncGenerator[kernel.Actor]:
        """Yield the actor of one save."""

        async def take(message: kernel.TreeToSave, /) -> kernel.LeafBatch:
            leaves = tuple(cast("list[kernel.Leaf]", message.take()))
            run.progress.plan(len(leaves), sum(leaf.nbytes for leaf in leaves))
            return kernel.LeafBatch(leaves)

        yield take


@final
@dataclass(frozen=True, slots=True)
class _WriteBySpecs:
    """Writes copied arrays by TensorStore; done when all of them are durable."""

    arrays: Sequence[tuple[ParamInfo, Callable[[], dict[str, Any]]]]
    messages: ClassVar[kernel.Messages] = {kernel.StagedBatch: kernel.Committed}

    @asynccontextmanager
    async def open(self, run: kernel.SaveRun, /) -> AsyncGenerator[kernel.Actor]:
        """Yield the actor of one save."""
        yield _Writer(run, self)


@final
class _Writer:
    __slots__ = ("_arrays", "_nbytes", "_run", "_stores", "_transactions", "_writing")

    def __init__(self, run: kernel.SaveRun, batch: _WriteBySpecs) -> None:
        self._run, self._arrays, self._nbytes = run, batch.arrays, 0
        # In a transaction each chunk is encoded once, in whatever parts it comes. What goes to a database is
        # there at once; files cannot be.
        self._transactions = {is_atomic: _ts.Transaction(atomic=is_atomic) for is_atomic in (True, False)}
        self._stores: list[Any] = []
        self._writing: list[tuple[ParamInfo, Any]] = []

    async def __call__(self, batch: kernel.StagedBatch, /) -> None:
        try:
            if not self._stores:
                self._stores = await self._open()
            for piece in batch.parts():
                self._begin(piece)
        finally:
            batch.release()  # the transactions hold the bytes until all of them are there

        self._run.progress.advance(len(batch.leaves), batch.nbytes)

    async def _open(self) -> list[Any]:
        infos = [info for info, _ in self._arrays]
        for info in infos:
            await info.await_path_creation()

        specs = [spec() for _, spec in self._arrays]
        context = _contexts(infos)
        within = [self._transactions[_kvstore_of(spec).get("driver") == "ocdbt"] for spec in specs]
        opening = [
            _ts.open(
                _ts.Spec(spec),
                create=True,
                open=True,
                context=context(info),
                # Among files an array may be made by another process at the same time.
                transaction=transaction if transaction.atomic else None,
            )
            for info, spec, transaction in zip(infos, specs, within, strict=True)
        ]
        opened = await _all_results(opening, infos)
        return [
            store if transaction.atomic else store.with_transaction(transaction)
            for store, transaction in zip(opened, within, strict=True)
        ]

    def _begin(self, piece: kernel.Piece) -> None:
        spec, (info, _) = piece.leaf.spec, self._arrays[piece.leaf.index]
        elements = np.frombuffer(piece.data, np.uint8).view(dtypes.numpy_dtype(spec.dtype))
        corner = [at * size for at, size in zip(piece.chunk, spec.chunk_shape, strict=True)]
        begins = piece.start // spec.itemsize
        store = self._stores[piece.leaf.index]
        if store.dtype != _ts.dtype(elements.dtype):
            store = _ts.cast(store, elements.dtype)  # the spec may say another one

        for box in _boxes(spec.chunk_shape, begins, begins + len(elements)):
            shape = [stop - start for start, stop in box]
            part, elements = np.split(elements, [math.prod(shape)])
            place = tuple([slice(at + lo, at + hi) for at, (lo, hi) in zip(corner, box, strict=True)]) or ...
            # Without a copy: what was staged does not change.
            written = store[place].write(part.reshape(shape), can_reference_source_data_indefinitely=True)
            self._writing.append((info, written))

        self._nbytes += piece.nbytes

    async def finish(self) -> AsyncIterator[kernel.Committed]:
        infos = [info for info, _ in self._writing]
        await _all_results([written for _, written in self._writing], infos)
        for transaction in self._transactions.values():
            await blocking.await_future(transaction.commit_async())

        yield kernel.Committed(len(self._stores), self._nbytes, 0)


def _boxes(
    shape: Sequence[int], start: int, stop: int, outer: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield boxes that are together, in this order, the elements from `start` to `stop` in C order."""
    if not shape:
        yield outer
        return

    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:
        yield from _boxes(shape[1:], start - last * row, stop - last * row, (*outer, (last, first)))
        return
    if start < first * row:
        yield from _boxes(shape[1:], start - (first - 1) * row, row, (*outer, (first - 1, first)))
    if first < last:
        yield (*outer, (first, last), *[(0, size) for size in shape[1:]])
    if last * row < stop:
        yield from _boxes(shape[1:], 0, stop - last * row, (*outer, (last, last + 1)))


async def open_arrays(
    infos: Sequence[ParamInfo], specs: Sequence[dict[str, Any]], *, compare: bool
) -> list[Any]:
    """Open stored arrays.

    Args:
        infos: Of the leaves; their directories are there.
        specs: TensorStore's.
        compare: Whether what is recorded of their bytes is compared, for a restore.

    Raises:
        FileNotFoundError: If one with its own directory is missing.
        ValueError: If one in a database is missing, or something is damaged.
        ChecksumError: If stored bytes are not those that were written.
    """
    await in_thread(_check_files, infos, specs)
    if compare:
        await in_thread(_compare, infos)

    context = _contexts(infos)
    futures = [
        _ts.open(_ts.Spec(spec), open=True, context=context(info))
        for info, spec in zip(infos, specs, strict=True)
    ]
    return await _all_results(futures, infos)


def _check_files(infos: Sequence[ParamInfo], specs: Sequence[dict[str, Any]]) -> None:
    """Refuse missing arrays, which TensorStore does not tell apart from damaged ones."""
    for info, spec in zip(infos, specs, strict=True):
        kvstore, inner = _kvstore_of(spec), spec.get("base", spec)
        if kvstore.get("driver") != "file":
            continue

        directory = cast("str", kvstore["path"])
        key = inner.get("metadata_key") or ("zarr.json" if inner["driver"] == "zarr3" else ".zarray")
        for path in (directory, os.path.join(directory, key)):
            if not os.path.exists(path):
                raise FileNotFoundError(f"the array {info.name!r} is not there: {path} does not exist")


def _kvstore_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the store of keys below a cast; an empty spec for one that is given as a URL."""
    kvstore: Any = spec.get("base", spec).get("kvstore")
    return cast("dict[str, Any]", kvstore) if isinstance(kvstore, dict) else {}


def _compare(infos: Iterable[ParamInfo]) -> None:
    """Compare stored arrays, and the documents that describe them, with their checksums. Blocking."""
    by_directory: dict[str, set[str]] = {}
    for info in infos:
        by_directory.setdefault(str(info.parent_dir), set()).add(info.name)

    for directory, names in by_directory.items():
        check_arrays(built_in.LocalStore(), directory, names)


def opened_metadata(store: Any, info: ParamInfo, sharding: ShardingMetadata | None = None) -> ArrayMetadata:
    """Describe an open array."""
    base = store
    while getattr(base, "base", None) is not None:  # below a cast
        base = base.base

    zarr = None
    with suppress(Exception):  # the metadata is optional
        zarr = ZarrMetadata.from_json(base.spec().to_json().get("metadata"))

    return ArrayMetadata(
        name=info.name,
        directory=info.parent_dir,
        shape=tuple(store.shape),
        dtype=cast("np.dtype[Any]", store.dtype.numpy_dtype),
        sharding=sharding,
        storage=StorageMetadata(
            chunk_shape=store.chunk_layout.read_chunk_template.shape,
            write_shape=info.write_shape,
            zarr_metadata=zarr,
        ),
    )


def _contexts(infos: Any) -> Any:
    """Return a function from a leaf to its context: its own, or one shared by all other leaves."""
    made: list[Any] = []

    def find(info: ParamInfo) -> Any:
        if info.ts_context is not None:
            return info.ts_context
        if not made:
            made.append(get_ts_context())

        return made[0]

    return find


@final
@dataclass(frozen=True, slots=True)
class ArrayToRead:
    """One array of a batch, opened with the dtype that it is to have."""

    info: ParamInfo
    store: Any
    like: Any  #: the leaf of a restore's target
    finish: Callable[[Any], Any] | None = None  #: makes of the restored array what is asked for; blocking


def target_of(arg: RestoreArgs, place: Any, info: ParamInfo, store: Any) -> Any:
    """Return the target of a jax.Array.

    Args:
        arg: The restore args of the leaf; typed keys are requested by their own shape.
        place: A sharding of jax, or a `Format` that has one.
        info: Of the leaf.
        store: The opened array.

    Raises:
        ValueError: If no sharding can be made of `place`, or the shape is not the stored one.
    """
    sharding = place if isinstance(place, jax.sharding.Sharding) else getattr(place, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        problem = f"the leaf {info.name!r} cannot be restored with the sharding {place!r}"
        raise ValueError(problem)  # the kind that Orbax raises

    stored = tuple(store.shape)
    shape = getattr(arg, "global_shape", None)
    if shape is not None and arg.dtype is not None and prng_keys.is_key(arg.dtype):
        struct = _jax.eval_shape(jax.random.key_data, _jax.ShapeDtypeStruct(tuple(shape), arg.dtype))
        sharding = _also_along(sharding, len(struct.shape) - len(shape))
        shape = struct.shape

    shape = stored if shape is None else tuple(shape)
    if getattr(arg, "strict", True) and shape != stored:
        raise ValueError(
            f"the leaf {info.name!r} has the shape {stored}, and {shape} is asked for; "
            f"strict=False pads with zeros and cuts off"
        )
    if len(shape) != len(stored):
        raise ValueError(f"the leaf {info.name!r} has {len(stored)} axes, and {len(shape)} are asked for")

    return _jax.ShapeDtypeStruct(shape, np.dtype(store.dtype.numpy_dtype), sharding=sharding)


def _also_along(sharding: jax.sharding.Sharding, axes: int) -> jax.sharding.Sharding:
    """The sharding of data with more trailing axes than what was sharded."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding

    spec = _jax.sharding.PartitionSpec(*sharding.spec, *[None] * axes)
    return jax.sharding.NamedSharding(cast("Any", sharding.mesh), spec)


async def read_arrays(arrays: Sequence[ArrayToRead]) -> list[Any]:
    """Read a batch: of each array the parts that this process needs, each once.

    Raises:
        ValueError: If the sharding does not divide an array, or something of it is missing.
    """
    path = _name_of_run(arrays[0].info)
    opened = OpenArrays(path, arrays)
    resized = any(
        tuple(one.like.shape) != tuple(one.store.shape) for one in arrays if one.like is not np.ndarray
    )
    async with _own_checkpointer() as checkpointer:
        values = await checkpointer.restore(
            path,
            like=[one.like for one in arrays],
            strict=not resized,
            pipeline=pipelines.restore_pipeline().replace("locate", _Opened(opened)),
        )

    def finished() -> list[Any]:
        return [
            value if one.finish is None else one.finish(value)
            for one, value in zip(arrays, values, strict=True)
        ]

    return await in_thread(finished) if any(one.finish for one in arrays) else list(values)


@final
@dataclass(frozen=True, slots=True)
class _Opened:
    """The first stage of a restore of arrays that are open already."""

    arrays: OpenArrays
    messages: ClassVar[kernel.Messages] = {kernel.RestoreRequest: kernel.Located}

    @asynccontextmanager
    async def open(self, run: kernel.RestoreRun, /) -> AsyncGenerator[kernel.Actor]:
        """Yield the actor of one restore."""

        async def locate(request: kernel.RestoreRequest, /) -> kernel.Located:
            return kernel.Located(self.arrays, request)

        yield locate


@final
@dataclass(frozen=True, slots=True, eq=False)
class OpenArrays:
    """Open arrays, as a checkpoint that TensorStore reads."""

    path: str
    arrays: Sequence[ArrayToRead]
    custom_metadata: Mapping[str, Any] | None = None
    tree_custom_metadata: object = None
    root_custom_metadata: Mapping[str, Any] | None = None
    committed_at_ns: int | None = None
    digests: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def directory(self) -> str:
        """The same as `path`."""
        return self.path

    @property
    def leaves(self) -> Sequence[kernel.StoredLeaf]:
        """Every array, as an element of a list."""
        return [self._leaf(at, array) for at, array in enumerate(self.arrays)]

    def _leaf(self, at: int, array: ArrayToRead) -> kernel.StoredLeaf:
        store = array.store
        dtype = np.dtype(store.dtype.numpy_dtype)
        chunk = tuple([max(1, size) for size in store.chunk_layout.read_chunk_template.shape])
        typestr = "np.ndarray" if array.like is np.ndarray else "jax.Array"
        spec = kernel.LeafSpec(typestr, tuple(store.shape), dtypes.dtype_name(dtype), dtype.itemsize, chunk)
        info = kernel.ParamInfo((str(at),), (kernel.KeyKind.SEQUENCE,), array.info.name, self.path)
        return kernel.StoredLeaf(info, spec, array)

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[kernel.Written]]:
        """Say of no array where its bytes are: TensorStore knows."""
        return [()] * len(numbers)

    def reads(
        self, index: int, stored: kernel.StoredLeaf, region: Any, piece_bytes: int
    ) -> Iterator[kernel.DriverRead]:
        """Have TensorStore fill a region at once."""
        array = cast("ArrayToRead", stored.detail)
        yield kernel.DriverRead(index, region.nbytes, partial(_fill, array, region))


async def _fill(array: ArrayToRead, region: Any) -> None:
    dtype, bounds = np.dtype(array.store.dtype.numpy_dtype), region.bounds
    async with _reserved(array.info.byte_limiter, region.nbytes):
        with _blaming(array.info):
            elements = np.frombuffer(region.view(), dtype).reshape([hi - lo for lo, hi in bounds])
            place = tuple([slice(lo, hi) for lo, hi in bounds]) or ...
            await blocking.await_future(_ts.array(elements, copy=False).write(array.store[place]).commit)


async def _all_results(futures: Sequence[Any], infos: Sequence[ParamInfo]) -> list[Any]:
    """Wait for one TensorStore future per leaf.

    Raises:
        Exception: The first error. The other futures are cancelled.
    """
    try:
        results: list[Any] = []
        for future, info in zip(futures, infos, strict=True):
            with _blaming(info):
                results.append(future.result() if future.done() else await blocking.await_future(future))
    except BaseException:
        for future in futures:
            future.cancel()
        raise

    return results


@contextmanager
def _blaming(info: ParamInfo) -> Generator[None]:
    """Add the name of the leaf to errors."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the leaf {info.name!r}")
        raise


@asynccontextmanager
async def _reserved(limiter: Any, nbytes: int) -> AsyncGenerator[None]:
    """Hold bytes of a limiter, if there is one: an object with `wait_for_bytes` and `release_bytes`."""
    if limiter is None:
        yield
        return

    await limiter.wait_for_bytes(nbytes)
    try:
        yield
    finally:
        await limiter.release_bytes(nbytes)


def sharding_pointer(name: str) -> str:
    """The JSON pointer of a leaf's sharding in `_sharding`."""
    return f"/{urlsafe_b64encode(name.encode()).decode()}"


def write_values(file: str, entries: Sequence[tuple[ParamInfo, str, str]]) -> None:
    """Add strings to a document, all of them or none. Blocking.

    Args:
        file: The name of the document.
        entries: Of each leaf, the JSON pointer and the text.
    """
    transaction, context = _ts.Transaction(), get_ts_context(use_ocdbt=False)
    opening = [
        _ts.open(json_spec(str(info.parent_dir), file, pointer), open=True, context=context)
        for info, pointer, _ in entries
    ]
    writing = [
        future.result().with_transaction(transaction).write(text)
        for future, (_, _, text) in zip(opening, entries, strict=True)
    ]
    for future in writing:
        future.result()

    transaction.commit_async().result()


async def read_values(file: str, infos: Sequence[ParamInfo], pointers: Sequence[str]) -> list[Any]:
    """Read a value for each leaf.

    Raises:
        ValueError: If the document or a value is missing.
        ChecksumError: If the document is not as it was written.
    """
    for directory in {str(info.parent_dir) for info in infos}:
        await in_thread(check_document, directory, file)

    context = get_ts_context(use_ocdbt=False)
    opening = [
        _ts.open(json_spec(str(info.parent_dir), file, pointer), open=True, read=True, context=context)
        for info, pointer in zip(infos, pointers, strict=True)
    ]
    opened = await _all_results(opening, infos)
    return [value.item() for value in await _all_results([store.read() for store in opened], infos)]
