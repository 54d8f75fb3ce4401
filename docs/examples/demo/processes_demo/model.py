"""A network of two layers whose parameters and moments are sharded over all devices.

Each device gathers the parameters, computes the same gradients, and updates its own part. Nothing is added up
between devices, so the result is the same, bit for bit, however they are spread over processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from processes_demo.member import BATCH, WIDTH

jax: Any = import_module("jax")  # which annotates little of what is used here
WHOLE, SHARDED = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("device")

State = dict[str, Any]


def make_mesh() -> Any:
    """Return a mesh of all devices of the job."""
    return jax.make_mesh((jax.device_count(),), ("device",))


def init(mesh: Any) -> State:
    """Return the state before the first step, spread over the mesh by rows."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for name in ("first", "second")}
    zeros = {name: np.zeros_like(weight) for name, weight in weights.items()}
    return {"params": _spread(weights, mesh), "momentum": _spread(zeros, mesh)}


def make_step(mesh: Any) -> Callable[[State, int], tuple[State, Any]]:
    """Return the function that takes a state and a step's number to the next state and the loss."""
    specs = {"in_specs": (SHARDED, WHOLE), "out_specs": (SHARDED, WHOLE)}
    update: Any = jax.jit(jax.shard_map(_on_device, mesh=mesh, **specs, check_vma=False))

    def step_once(state: State, step: int) -> tuple[State, Any]:
        batch = np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)
        after, loss = update(state, batch)
        return after, loss

    return step_once


def digest(state: State) -> dict[str, str]:
    """Return a digest of each part of the state that this process holds, by where it lies in the whole."""
    found: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        for shard in leaf.addressable_shards:
            place = f"{jax.tree_util.keystr(path)} {shard.index[0].start or 0}"
            found[place] = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()

    return found


def _on_device(state: State, batch: Any) -> tuple[State, Any]:
    def gathered(part: Any) -> Any:
        return jax.lax.all_gather(part, "device", tiled=True)

    n_rows, at = WIDTH // jax.lax.axis_size("device"), jax.lax.axis_index("device")

    def moved(momentum: Any, gradient: Any) -> Any:
        return 0.9 * momentum + jax.lax.dynamic_slice_in_dim(gradient, at * n_rows, n_rows)

    def stepped(param: Any, momentum: Any) -> Any:
        return param - 0.01 * momentum

    whole: State = jax.tree.map(gathered, state["params"])
    loss, gradients = jax.value_and_grad(_loss)(whole, batch)
    momentum = jax.tree.map(moved, state["momentum"], gradients)
    return {"params": jax.tree.map(stepped, state["params"], momentum), "momentum": momentum}, loss


def _loss(params: State, batch: Any) -> Any:
    hidden = jax.numpy.tanh(batch @ params["first"])
    return jax.numpy.mean((hidden @ params["second"] - batch) ** 2)


def _spread(values: State, mesh: Any) -> State:
    over = jax.sharding.NamedSharding(mesh, SHARDED)

    def one(value: Any) -> Any:
        def part(index: Any) -> Any:
            return value[index]

        return jax.make_array_from_callback(value.shape, over, part)

    return {name: one(value) for name, value in values.items()}
