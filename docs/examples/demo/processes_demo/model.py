"""A network of two layers whose parameters and moments are sharded over all devices.

Each device gathers the parameters, computes the same gradients, and updates its own part. Nothing is added up
between devices, so the result is the same, bit for bit, however they are spread over processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from processes_demo.member import BATCH, WIDTH

SHARDED: Any = PartitionSpec("device")


def init(mesh: Mesh) -> dict[str, Any]:
    """Return the state before the first step, spread over the mesh by rows."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for name in ("first", "second")}
    zeros = {name: np.zeros_like(weight) for name, weight in weights.items()}
    return {"params": _spread(weights, mesh), "momentum": _spread(zeros, mesh)}


def make_step(mesh: Mesh) -> Callable[[dict[str, Any], int], tuple[dict[str, Any], Any]]:
    """Return the function that takes a state and a step's number to the next state and the loss."""

    def on_device(state: Any, batch: Any) -> Any:
        whole = jax.tree.map(lambda x: jax.lax.all_gather(x, "device", tiled=True), state["params"])
        loss, gradients = jax.value_and_grad(_loss)(whole, batch)
        n_rows, at = WIDTH // jax.lax.axis_size("device"), jax.lax.axis_index("device")

        def own(x: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, at * n_rows, n_rows)

        momentum = jax.tree.map(lambda m, g: 0.9 * m + own(g), state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, loss

    spread: Any = jax.shard_map
    update = jax.jit(
        spread(
            on_device,
            mesh=mesh,
            in_specs=(SHARDED, PartitionSpec()),
            out_specs=(SHARDED, PartitionSpec()),
            check_vma=False,
        )
    )

    def step_once(state: dict[str, Any], step: int) -> tuple[dict[str, Any], Any]:
        batch = np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)
        found: Any = update(state, batch)
        return cast("tuple[dict[str, Any], Any]", found)

    return step_once


def digest(state: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each part of the state that this process holds, by where it lies in the whole."""
    return {
        f"{jax.tree_util.keystr(path)} {shard.index[0].start or 0}": hashlib.sha256(
            np.asarray(shard.data).tobytes()
        ).hexdigest()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        for shard in leaf.addressable_shards
    }


def _loss(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch @ params["first"])
    return jnp.mean((hidden @ params["second"] - batch) ** 2)


def _spread(values: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    over = NamedSharding(mesh, SHARDED)
    return {
        name: jax.make_array_from_callback(value.shape, over, lambda index, held=value: held[index])
        for name, value in values.items()
    }
