"""How the options of an `ArrayHandler` change the storage of a jax.Array in a pipeline. Pure."""

from __future__ import annotations

__all__ = ("Described", "replicas_share_by_default")

import math
import os
from dataclasses import dataclass, replace
from typing import final

from penstock.handlers.formats.orbax.storage_choice import replica_shape
from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.protocols.leaf import LeafSpec


@final
@dataclass(frozen=True, slots=True)
class Described:
    """Adapts the handler's description of each array to the options.

    Attributes:
        parallel: Whether each replica of a shard writes a part of it.
        min_slice_bytes: Bytes of a part below which the shard is not divided.
        max_replicas: The most parts that it is divided into.
        replica_id: Which replica writes a shard that is not divided; None for any.
        shardings: Whether shardings are recorded.
        shapes: Whether the chunks of arrays and the kind of typed keys are recorded.
    """

    parallel: bool = True
    min_slice_bytes: int | None = None
    max_replicas: int | None = None
    replica_id: int | None = 0
    shardings: bool = True
    shapes: bool = True

    def __call__(self, spec: LeafSpec, key_path: str) -> LeafSpec:
        """Return the spec with the options applied.

        Raises:
            InvalidLeafError: If no replica would write the array; it is a ValueError.
        """
        if self.parallel and self.replica_id is None:
            raise InvalidLeafError(key_path, "use_replica_parallel needs a replica_id")

        n_parts = self._n_parts(spec)
        if n_parts == 1 and (self.replica_id or 0) >= spec.n_replicas:
            problem = f"replica_id is {self.replica_id}, but its shards have {spec.n_replicas} replicas"
            raise InvalidLeafError(key_path, problem)

        spec = replace(
            spec,
            n_replicas=n_parts,
            sharding=spec.sharding if self.shardings else None,
            shapes_recorded=self.shapes,
        )
        return self._divided(spec, n_parts) if spec.is_global else spec

    def _divided(self, spec: LeafSpec, n_parts: int) -> LeafSpec:
        """Say which replicas write what, of an array of several processes. Nobody else then divides it."""
        part = None if n_parts == 1 or not spec.nbytes else replica_shape(spec.write_shape or (), n_parts)
        if part is None:
            return replace(spec, n_replicas=1, writer=self.replica_id or 0)

        return replace(spec, n_replicas=1, n_writers=n_parts, write_shape=part, chunk_shape=part)

    def _n_parts(self, spec: LeafSpec) -> int:
        wanted = spec.n_replicas if self.max_replicas is None else min(spec.n_replicas, self.max_replicas)
        if not self.parallel or wanted <= 1 or spec.write_shape is None:
            return 1

        part = replica_shape(spec.write_shape, wanted)
        if part is None or math.prod(part) * spec.itemsize < (self.min_slice_bytes or 0):
            return 1

        return wanted


def replicas_share_by_default() -> bool:
    """Whether replicas share the work by default: unless JAX_PLATFORMS names a GPU, as in Orbax."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    return "gpu" not in platforms and "cuda" not in platforms
