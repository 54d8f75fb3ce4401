"""A restore in which one replica reads and sends the bytes to all the others.

`SingleReplica` takes the leaves of a restore; `ReplicaBroadcast` below it sends arrays in rounds. A round is
one collective over the mesh, always of the same program: words that one replica has and zeros of all others
are added up along the axis. They are integers, so every bit arrives, whatever the dtype.
"""

from __future__ import annotations

__all__ = (
    "ReplicaAxis",
    "ReplicaBroadcast",
    "Share",
    "SharedArray",
    "SingleReplica",
    "broadcast_together",
    "rounds_of",
)

import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias, TypeVar, cast, final

import jax
import numpy as np
import numpy.typing as npt
from anyio import Lock, sleep
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from penstock.handlers.coordinators.job import move_on_after_awake
from penstock.handlers.coordinators.job_options import JobLimits
from penstock.handlers.coordinators.silence import LATER
from penstock.handlers.leaves.blocks import Box, boxes
from penstock.handlers.leaves.device_assembly import as_bits, blank_shard, paste
from penstock.handlers.leaves.devices import Device, on_host
from penstock.handlers.leaves.prng_keys import is_key
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import CoordinationError, OutcomeUnknownError, PeerSilentError, SpecError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.protocols.coordinator import Operation

T = TypeVar("T")
R = TypeVar("R")
Share: TypeAlias = Callable[["bytes | None"], Awaitable[bytes]]
"""Gives every process the bytes that process 0 has."""

_tree: Any = tree_util  # which jax annotates only in part
_jax: Any = jax

_BROKEN: Final[type[Exception]] = _jax.errors.JaxRuntimeError
"""What a collective raises."""

PART: Final = 4
"""A round takes this part of the memory budget at most."""

MOST_BYTES: Final = 16 * 2**20
"""Of one device in a round. More gains nothing."""


@final
@dataclass(frozen=True, slots=True)
class SingleReplica:
    """The leaves that one restore reads in one replica alone.

    Args:
        like: What is read: of leaves with replicas, over the devices of the one that is read.
        shared: Those leaves, by their place in flatten order.
    """

    like: Any
    shared: dict[int, SharedArray]
    axis: ReplicaAxis

    @classmethod
    def of(cls, like: Any, axis: ReplicaAxis, processes: Sequence[int]) -> SingleReplica:
        """Divide a target. Every process does alike. Blocking.

        Args:
            like: The target.
            axis: Along which replicas are.
            processes: Who takes part. An array that others have shards of is not sent.
        """
        paths, treedef = _tree.tree_flatten_with_path(like)
        shared: dict[int, SharedArray] = {}
        leaves: list[Any] = []
        for at, (path, leaf) in enumerate(paths):
            found = _shared(_tree.keystr(path), leaf, axis, frozenset(processes))
            leaves.append(leaf if found is None else _read_by_one(found, axis))
            if found is not None:
                shared[at] = found

        return cls(treedef.unflatten(leaves), shared, axis)

    @property
    def arrays(self) -> Sequence[SharedArray]:
        """The leaves that are sent, in order."""
        return list(self.shared.values())

    def together(self, tree: T, arrays: Sequence[jax.Array]) -> T:
        """Put the arrays that were sent into the tree that was read."""
        leaves, treedef = _tree.tree_flatten(tree)
        for at, array in zip(self.shared, arrays, strict=True):
            leaves[at] = array

        return cast("T", treedef.unflatten(leaves))

    def sources(self, tree: object) -> Sequence[jax.Array]:
        """Return the leaves that were read and are to be sent."""
        leaves = _tree.tree_leaves(tree)
        return [leaves[at] for at in self.shared]


async def broadcast_together(
    operation: Operation,
    arrays: Sequence[SharedArray],
    axis: ReplicaAxis,
    read: Callable[[Share], Awaitable[tuple[T, Sequence[jax.Array]]]],
    limits: JobLimits,
    memory: MemoryRegulator,
    threads: Threads,
    turn: Lock,
) -> tuple[T, Sequence[jax.Array]]:
    """Have all processes agree, read their parts, and send the bytes of one replica to the others.

    No process enters a collective before all have read what they should: one that cannot tells the others.

    Args:
        operation: What the processes agree by.
        arrays: What is sent, in the same order in all processes.
        axis: Along which replicas are.
        read: Returns what was read here, and of it the arrays of one replica. All call what it is given once.
        limits: How long the processes wait for each other.
        memory: What a round takes on the host is leased from it.
        threads: For what blocks.
        turn: Held by the primary for its collectives: those of two restores would take each other's bytes, if
            processes entered them in another order. The others enter none before the primary has met them.

    Returns:
        What was read, and the arrays over all replicas.

    Raises:
        PlansDifferError: If the processes are not asked for the same.
        PeerError: If another process fails, or is not heard of.
        CoordinationError: If a collective failed, or was not over in `JobLimits.write_s`.

    Cancellation:
        Ends it for all processes. A collective that waits for a process that is gone is left in its thread.
    """
    result: tuple[T, Sequence[jax.Array]] | None = None
    describe = partial(_described, arrays, axis)
    digest = await threads.run(_digest, describe)
    try:
        async with operation.running():
            most_bytes = await _agree(operation, digest, describe, memory)
            collectives = _Collectives(operation, limits, memory, threads, most_bytes)
            # The others enter no collective before the primary has met them.
            async with turn if operation.is_primary else nullcontext():
                operation.at("read")
                value, sources = await read(collectives.share)
                await operation.meet("replicas")
                operation.at("broadcast")
                broadcast = await threads.run(ReplicaBroadcast, arrays, sources, axis)
                del sources
                for round_ in await threads.run(_rounds, arrays, most_bytes):
                    await collectives.perform(round_.words * round_.n_local, broadcast.perform, round_)

                operation.at("received")
                await operation.combine(b"=", lambda _: b"")  # once all have received everything

            result = value, await threads.run(broadcast.all_arrays)
    except OutcomeUnknownError as error:  # nothing is published here
        raise PeerSilentError({error.processes[0]: error.peer_stage}, limits.silence_s) from error

    assert result is not None, "what ends an operation is raised"
    return result


async def _agree(
    operation: Operation, digest: bytes, describe: Callable[[], Sequence[str]], memory: MemoryRegulator
) -> int:
    """Compare the requests of all processes; return the bytes of a device in a round."""

    async def begin(_: Mapping[int, bytes]) -> tuple[str, bytes]:
        n_local: int = _jax.local_device_count()
        most_bytes = LEAST_WORDS * WORD
        while 2 * most_bytes * n_local * COPIES * PART <= memory.limit and most_bytes < MOST_BYTES:
            most_bytes *= 2

        return str(most_bytes), b""

    operation.at("agree")
    said, _ = await operation.agree(digest, describe, begin)
    return int(said)


@final
@dataclass(frozen=True, slots=True)
class _Collectives:
    """Collectives that all processes of an operation perform in one order, each in a thread."""

    operation: Operation
    limits: JobLimits
    memory: MemoryRegulator
    threads: Threads
    most_bytes: int

    async def perform(self, n_words: int, call: Callable[..., R], *args: object) -> R:
        """Perform one round, to which this process adds so many words."""
        limits = self.limits
        lease = await self.memory.acquire(n_words * WORD * COPIES, admit_oversize=True, flow="restore")
        try:
            async with move_on_after_awake(limits.write_s, limits.beat_s):
                return await self.threads.leaving_calls(0.0).run(call, *args)
        except _BROKEN as error:
            # Mostly since a process is gone. Who is silent is named by then, and that ends this.
            await sleep(LATER * limits.silence_s + 2 * limits.beat_s)
            raise CoordinationError(f"a broadcast by the devices failed: {error}") from error
        finally:
            lease.release()

        raise CoordinationError(f"a broadcast by the devices took more than {limits.write_s:g} s")

    async def share(self, data: bytes | None) -> bytes:
        """Return the bytes that process 0 has; the others have None."""
        await self.operation.meet("documents")
        send = partial(send_words, tuple(self.operation.processes))
        words = np.zeros(LEAST_WORDS, np.uint32)
        if data is not None:
            words[:2] = divmod(len(data), 1 << 32)

        high, low = (await self.perform(LEAST_WORDS, send, words))[:2].tolist()
        nbytes = (high << 32) + low
        found = bytearray(nbytes)
        for at in range(0, nbytes, self.most_bytes):
            size = min(self.most_bytes, nbytes - at)
            words = np.zeros(words_for(size), np.uint32)
            if data is not None:
                words.view(np.uint8)[:size] = np.frombuffer(data, np.uint8, size, at)

            received = await self.perform(len(words), send, words)
            found[at : at + size] = received.view(np.uint8)[:size].tobytes()

        return bytes(found)


def _shared(key_path: str, leaf: Any, axis: ReplicaAxis, processes: frozenset[int]) -> SharedArray | None:
    """Return the array of a leaf that is sent; None if every process reads it."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or is_key(leaf.dtype) or 0 in leaf.shape:
        return None

    sharding: Any = leaf.sharding
    if axis.one_replica(sharding) is None or not processes_of_mesh(sharding.mesh) <= processes:
        return None

    return SharedArray(key_path, tuple(leaf.shape), np.dtype(leaf.dtype), sharding)


def _read_by_one(array: SharedArray, axis: ReplicaAxis) -> jax.ShapeDtypeStruct:
    one = axis.one_replica(array.sharding)
    struct: jax.ShapeDtypeStruct = _jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=one)
    return struct


def _rounds(arrays: Sequence[SharedArray], most_bytes: int) -> list[Round]:
    return list(rounds_of(arrays, most_bytes))


def _digest(describe: Callable[[], Sequence[str]]) -> bytes:
    return hashlib.sha256("\n".join(describe()).encode("utf-8", "surrogatepass")).digest()


def _described(arrays: Sequence[SharedArray], axis: ReplicaAxis) -> list[str]:
    texts = {
        number: str(one) for number, one in {id(each.sharding): each.sharding for each in arrays}.items()
    }
    lines = [f"option replica_axis\t{axis.name!r}, of which {axis.primary} is read"]
    return lines + [
        f"{each.key_path or 'the tree'}\t{each.dtype.name}{list(each.shape)} over {texts[id(each.sharding)]}"
        for each in arrays
    ]


_P: Any = PartitionSpec  # which jax does not annotate
AXIS = "process"


def send_words(processes: tuple[int, ...], words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return the words of the process that has any; those of all others are zeros. Blocking.

    Args:
        processes: Who calls it at one time; this one is among them.
        words: Of one length in all.
    """
    mesh = _one_device_of_each(processes)
    place = NamedSharding(mesh, _P(AXIS, None))
    mine = cast("Any", jax).device_put(words.reshape(1, -1), next(iter(mesh.local_devices)))
    whole = jax.make_array_from_single_device_arrays((len(processes), words.size), place, [mine])
    summed: Any = sum_over(mesh, AXIS)(whole)
    return np.asarray(summed.addressable_shards[0].data).reshape(-1)


@lru_cache(maxsize=16)  # keeps no arrays alive, only meshes, which live as long as the process
def _one_device_of_each(processes: tuple[int, ...]) -> Mesh:
    first: dict[int, Any] = {}
    for device in cast("Any", jax).devices():
        first.setdefault(device.process_index, device)

    return Mesh(np.array([first[index] for index in processes]), (AXIS,))


# A round is one collective over the mesh, always of the same program: words that one replica has and zeros
# of all others are added up along the axis. They are integers, so every bit arrives, whatever the dtype.
# What is sent are the shards of all leaves one after the other, so a thousand small ones take one round.
P: Any = PartitionSpec  # which jax does not annotate
WORD: Final = 4
LEAST_WORDS: Final = 1 << 14
"""Lengths of rounds are powers of two from here on, so that few programs are compiled."""

COPIES: Final = 3
"""Of a device's words on the host in a round: what is sent, its copy for the device, what is received."""


@final
@dataclass(frozen=True, slots=True)
class SharedArray:
    """An array that all replicas are to hold."""

    key_path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding  #: over all replicas

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what each device holds."""
        found: tuple[int, ...] = cast("Any", self.sharding).shard_shape(self.shape)
        return found


@final
@dataclass(frozen=True, slots=True)
class Round:
    """The boxes of shards that are sent at once, the same of every device, one after the other."""

    mesh: Mesh
    boxes: tuple[tuple[int, Box, int], ...]  #: number of the array, box of its shard, and where it begins
    nbytes: int  #: for each device

    @property
    def n_local(self) -> int:
        """The number of devices of this process that take part."""
        return len(_local_devices(self.mesh))

    @property
    def words(self) -> int:
        """The number of words that each device sends or receives."""
        return words_for(self.nbytes)


def words_for(nbytes: int) -> int:
    """Return how many words are sent for so many bytes: a power of two."""
    return max(LEAST_WORDS, 1 << (-(-nbytes // WORD) - 1).bit_length())


def rounds_of(arrays: Sequence[SharedArray], most_bytes: int) -> Iterator[Round]:
    """Divide the shards of all arrays into rounds. Pure: every process divides alike.

    Args:
        arrays: In the same order in all processes.
        most_bytes: Of a round, for each device.
    """
    by_mesh: defaultdict[Mesh, list[int]] = defaultdict(list)
    for number, array in enumerate(arrays):
        by_mesh[cast("Mesh", array.sharding.mesh)].append(number)

    for mesh, numbers in by_mesh.items():
        found: list[tuple[int, Box, int]] = []
        nbytes = 0
        for number in numbers:
            array = arrays[number]
            for box in boxes(array.shard_shape, max(1, most_bytes // array.dtype.itemsize)):
                size = box.n_elements * array.dtype.itemsize
                if found and nbytes + size > most_bytes:
                    yield Round(mesh, tuple(found), nbytes)
                    found, nbytes = [], 0

                found.append((number, box, nbytes))
                nbytes += size

        if found:
            yield Round(mesh, tuple(found), nbytes)


@final
class ReplicaBroadcast:
    """Fills the arrays of all replicas from one of them. Blocking; every process performs the same rounds.

    Args:
        arrays: In the same order in all processes.
        sources: The same, over the devices of the replica that was read; without those of other processes.
        axis: Along which replicas are.
    """

    __slots__ = ("_arrays", "_axis", "_shards", "_sources")

    def __init__(
        self, arrays: Sequence[SharedArray], sources: Sequence[jax.Array], axis: ReplicaAxis
    ) -> None:
        self._arrays = arrays
        self._axis = axis
        self._sources = [
            {shard.device: cast("jax.Array", shard.data) for shard in cast("Any", source).addressable_shards}
            for source in sources
        ]
        self._shards: list[dict[Device, Any]] = [dict(found) for found in self._sources]

    def perform(self, round_: Round) -> None:
        """Send one round. All processes of its mesh must be in it at one time."""
        local = _local_devices(round_.mesh)
        if not local:
            return

        names = round_.mesh.axis_names
        ones = (1,) * len(names)
        sent: list[Any] = []
        for device in local:
            words = np.zeros(round_.words, np.uint32)
            self._pack(round_, device, words.view(np.uint8))
            sent.append(cast("Any", jax).device_put(words.reshape(*ones, -1), device))

        shape = (*cast("Any", round_.mesh).devices.shape, round_.words)
        sharding = NamedSharding(round_.mesh, P(*names, None))
        whole = jax.make_array_from_single_device_arrays(shape, sharding, sent)
        received = sum_over(round_.mesh, self._axis.name)(whole)
        for shard in received.addressable_shards:
            self._unpack(round_, shard.device, np.asarray(shard.data).reshape(-1).view(np.uint8))

    def array(self, number: int) -> jax.Array:
        """Return one of the arrays, once all rounds are over."""
        array = self._arrays[number]
        shards = self._shards[number]
        self._shards[number], self._sources[number] = {}, {}
        return jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, [shards[device] for device in _local_devices(array.sharding.mesh)]
        )

    def all_arrays(self) -> list[jax.Array]:
        """Return all of them, in order."""
        return [self.array(number) for number in range(len(self._arrays))]

    def _pack(self, round_: Round, device: Device, into: npt.NDArray[np.uint8]) -> None:
        for number, box, start in round_.boxes:
            shard = self._sources[number].get(device)
            if shard is None:  # of another replica
                continue

            found = _on_host(shard, box)
            into[start : start + len(found)] = found

    def _unpack(self, round_: Round, device: Device, data: npt.NDArray[np.uint8]) -> None:
        for number, box, start in round_.boxes:
            if device in self._sources[number]:  # it has its shard
                continue

            array = self._arrays[number]
            end = start + box.n_elements * array.dtype.itemsize
            self._place(number, device, box, data[start:end].copy().view(array.dtype).reshape(box.sizes))

    def _place(self, number: int, device: Device, box: Box, host: npt.NDArray[Any]) -> None:
        array, shards = self._arrays[number], self._shards[number]
        # Whether jax narrows 64-bit types is a thread-local setting.
        with jax.enable_x64(True) if array.dtype.itemsize == 8 else nullcontext():
            part = cast("Any", jax).device_put(host, device)
            if box.sizes != array.shard_shape:
                shard = shards.pop(device, None)
                if shard is None:
                    shard = blank_shard(array.shard_shape, array.dtype, device)

                part = paste(shard, part, tuple(map(np.uint32, box.starts)))

            shards[device] = part


def _on_host(shard: jax.Array, box: Box) -> npt.NDArray[np.uint8]:
    """Return the bytes of a box of a shard."""
    if box.sizes != shard.shape and not on_host(cast("Any", shard).sharding):
        found = np.asarray(_cut(shard, tuple(map(np.uint32, box.starts)), box.sizes)).reshape(-1)
    else:  # no bytes are copied that are in main memory
        found = np.asarray(shard).reshape(-1)[box.first : box.first + box.n_elements]

    return np.ascontiguousarray(found).view(np.uint8)


def _sliced(shard: jax.Array, starts: tuple[np.uint32, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(as_bits(shard), starts, sizes)


_cut: Callable[..., jax.Array] = cast("Any", jax).jit(_sliced, static_argnums=2)


@lru_cache(maxsize=16)  # keeps no arrays alive, only meshes, which live as long as the process
def sum_over(mesh: Mesh, axis: str) -> Callable[[Any], Any]:
    """Return the program that adds up words along an axis; each device has a row of them."""
    spec = P(*mesh.axis_names, None)

    def add(words: Any) -> Any:
        return cast("Any", jax.lax).psum(words, axis)

    mapped: Any = cast("Any", jax).shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled: Callable[[Any], Any] = cast("Any", jax).jit(mapped)
    return compiled


def _local_devices(mesh: Any) -> list[Device]:
    return list(mesh.local_mesh.devices.flat) if mesh.local_devices else []


@final
@dataclass(frozen=True, slots=True)
class ReplicaAxis:
    """The axis of a mesh along which replicas are, and the one that is read."""

    name: str
    primary: int = 0  #: its place along the axis

    def one_replica(self, sharding: object) -> NamedSharding | None:
        """Return the sharding of an array over the devices of the replica that is read.

        None if an array of this sharding has no replicas along the axis: another kind of sharding, a mesh
        without the axis or with one device along it, or an array that is cut along it.

        Raises:
            SpecError: If there is no such replica.
        """
        if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, AbstractMesh):
            return None

        mesh = sharding.mesh
        if mesh.shape.get(self.name, 1) < 2 or self.name in _axes_of(sharding):
            return None
        if not 0 <= self.primary < mesh.shape[self.name]:
            n_replicas = mesh.shape[self.name]
            raise SpecError(
                f"there is no replica {self.primary} of {n_replicas} along the axis {self.name!r}"
            )

        return NamedSharding(
            _without_replicas(mesh, self.name, self.primary),
            sharding.spec,
            memory_kind=cast("Any", sharding).memory_kind,
        )


@lru_cache(maxsize=64)
def processes_of_mesh(mesh: Mesh) -> frozenset[int]:
    """Return the processes whose devices a mesh has."""
    return frozenset([device.process_index for device in cast("Any", mesh).devices.flat])


@lru_cache(maxsize=64)  # keeps no arrays alive, only meshes, which live as long as the process
def _without_replicas(mesh: Mesh, name: str, primary: int) -> Mesh:
    """Return the mesh with an axis of length 1 in place of the replicas; shardings may still name it."""
    axis = mesh.axis_names.index(name)
    devices = np.take(cast("Any", mesh.devices), [primary], axis=axis)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _axes_of(sharding: NamedSharding) -> set[str]:
    """Return the names of the axes that cut an array."""
    found: set[str] = set()
    for part in cast("Sequence[str | tuple[str, ...] | None]", cast("Any", sharding).spec):
        if part is not None:
            found.update((part,) if isinstance(part, str) else part)

    return found
