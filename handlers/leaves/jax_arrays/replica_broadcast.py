"""Sends what the devices of one replica hold to those of all the others, in rounds of bounded size.

A round is one collective over the mesh, always of the same program: words that one replica has and zeros
of all others are added up along the axis. They are integers, so every bit arrives, whatever the dtype.
What is sent are the shards of all leaves one after the other, so a thousand small ones take one round.
"""

from __future__ import annotations

__all__ = ("ReplicaBroadcast", "Round", "SharedArray", "rounds_of", "sum_over", "words_for")

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast, final

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.handlers.leaves.common.contiguous_blocks import Box, boxes
from penstock.handlers.leaves.jax_arrays.device_assembly import as_bits, blank_shard, paste
from penstock.handlers.leaves.jax_arrays.devices import Device, on_host
from penstock.handlers.leaves.jax_arrays.replica_axis import ReplicaAxis

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
    """What is sent at once: boxes of shards, the same of every device, one behind the other."""

    mesh: Mesh
    boxes: tuple[tuple[int, Box, int], ...]  #: number of the array, box of its shard, and where it begins
    nbytes: int  #: for each device

    @property
    def n_local(self) -> int:
        """How many devices of this process take part."""
        return len(_local_devices(self.mesh))

    @property
    def words(self) -> int:
        """How many words each device sends or receives."""
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
        axis: Along which replicas lie.
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
