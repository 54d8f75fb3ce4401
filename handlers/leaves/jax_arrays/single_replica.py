"""A restore of which one replica reads, and from which all the others receive."""

from __future__ import annotations

__all__ = ("Share", "SingleReplica", "Turns", "broadcast_together")

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast, final

import jax
import numpy as np
from anyio import Lock, sleep
from jax import tree_util

from penstock.handlers.leaves.jax_arrays.prng_keys import is_key
from penstock.handlers.leaves.jax_arrays.process_broadcast import send_words
from penstock.handlers.leaves.jax_arrays.replica_axis import ReplicaAxis, processes_of_mesh
from penstock.handlers.leaves.jax_arrays.replica_broadcast import (
    COPIES,
    LEAST_WORDS,
    WORD,
    ReplicaBroadcast,
    Round,
    SharedArray,
    rounds_of,
    words_for,
)
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.coordination.key_value_calls import move_on_after_awake
from penstock.kernel.coordination.silence import LATER
from penstock.kernel.errors import CoordinationError, OutcomeUnknownError, PeerSilentError
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
class Turns:
    """Has the restores of one process that broadcast follow each other.

    Collectives of two would take each other's bytes, if processes entered them in another order. The primary
    decides: the others enter none before it has met them, which it does when it is the restore's turn.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()

    def of(self, operation: Operation) -> AbstractAsyncContextManager[None]:
        """Wait at the primary until this operation may begin its collectives; for the block."""
        return self._lock if operation.is_primary else nullcontext()


@final
@dataclass(frozen=True, slots=True)
class SingleReplica:
    """What one restore reads in one replica alone.

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
            axis: Along which replicas lie.
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
        """Return the leaves of what was read that are to be sent."""
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
    turns: Turns,
) -> tuple[T, Sequence[jax.Array]]:
    """Have all processes agree, read what each has to, and send what one replica has to the others.

    Nobody enters a collective before all have read what they should: so who cannot read tells the others.

    Args:
        operation: What the processes agree by.
        arrays: What is sent, in the same order in all processes.
        axis: Along which replicas lie.
        read: Returns what was read here, and of it the arrays of one replica. All call what it is given once.
        limits: How long the processes wait for each other.
        memory: What a round takes on the host is leased from it.
        threads: For what blocks.
        turns: Of this process.

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
            async with turns.of(operation):
                operation.at("read")
                value, sources = await read(collectives.share)
                await operation.meet("replicas")
                operation.at("broadcast")
                broadcast = await threads.run(ReplicaBroadcast, arrays, sources, axis)
                del sources
                for round_ in await threads.run(_rounds, arrays, most_bytes):
                    await collectives.perform(round_.words * round_.n_local, broadcast.perform, round_)

                await _leave_together(operation)

            result = value, await threads.run(broadcast.all_arrays)
    except OutcomeUnknownError as error:  # nothing is published here
        raise PeerSilentError({error.processes[0]: error.peer_stage}, limits.silence_s) from error

    assert result is not None, "what ends an operation is raised"
    return result


async def _agree(
    operation: Operation, digest: bytes, describe: Callable[[], Sequence[str]], memory: MemoryRegulator
) -> int:
    """Compare what is asked for; return how many bytes of a device the primary wants in a round."""
    operation.at("agree")
    await operation.agree(digest, describe)
    if not operation.is_primary:
        said, _ = await operation.wait_begun(digest, describe)
        return int(said)

    n_local: int = _jax.local_device_count()
    most_bytes = LEAST_WORDS * WORD
    while 2 * most_bytes * n_local * COPIES * PART <= memory.limit and most_bytes < MOST_BYTES:
        most_bytes *= 2

    await operation.begin(str(most_bytes))
    return most_bytes


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
        """Perform one of which this process has so many words in all."""
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


async def _leave_together(operation: Operation) -> None:
    """Wait until all processes have received everything."""
    operation.at("received")
    if operation.is_primary:
        await operation.parts()
        await operation.decide()
    else:
        await operation.bring(b"=")
        await operation.wait_decided()


def _shared(key_path: str, leaf: Any, axis: ReplicaAxis, processes: frozenset[int]) -> SharedArray | None:
    """Return what is sent of a leaf; None if every process reads it."""
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
