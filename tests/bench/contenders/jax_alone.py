"""What jax itself takes to give the bytes of sharded arrays, and to make arrays of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from tests.bench.contenders.protocol import Saved
from tests.bench.results import Operation
from tests.bench.trees import State, ready

_jax: Any = jax


@final
class JaxAlone:
    """The calls that penstock makes, with nothing around them. Its checkpoint is host memory."""

    label = checkpoint = "jax alone"
    operations = frozenset({Operation.SAVE, Operation.RESTORE_JAX})

    def __init__(self) -> None:
        private = import_module("jax._src.lib")
        self._put: Any = private.xla_client.batched_device_put
        self._copied = private._jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
        self._shards: list[list[Any]] = []
        self._avals: list[Any] = []

    def save(self, path: Path, state: State) -> Saved:
        n_devices = len(state.leaves[0].sharding.device_set)
        data = [b"".join(leaf.addressable_data(at) for at in range(n_devices)) for leaf in state.leaves]
        path.mkdir(exist_ok=True)
        if len(self._shards) != len(state.leaves):  # not those of the round before
            self._shards, self._avals = [], []
            for leaf, whole in zip(state.leaves, data, strict=True):
                rows = np.frombuffer(whole, leaf.dtype).reshape(n_devices, -1, *leaf.shape[1:])
                self._shards.append(list(rows))
                self._avals.append(leaf.aval)

        return Saved()

    def restore(self, path: Path, target: State) -> Any:
        made: list[Any] = []
        for leaf, aval, shards in zip(target.leaves, self._avals, self._shards, strict=True):
            devices = list(leaf.sharding.mesh.devices.flat)
            made.append(self._put(aval, leaf.sharding, shards, devices, True, False, self._copied))

        return ready(made)

    def metadata(self, path: Path) -> object:
        raise NotImplementedError

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        return iter(restored)
