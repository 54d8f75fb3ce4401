"""Sends bytes from one process to all others of a job, by a device of each."""

from __future__ import annotations

__all__ = ("send_words",)

from functools import lru_cache
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.handlers.leaves.jax_arrays.replica_broadcast import sum_over

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
