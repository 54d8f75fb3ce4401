"""`penstock.orbax` keeps steps on real servers, by text and by path objects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cloud.servers import Server

import penstock.orbax as v0
from penstock.orbax import v1

pytestmark = pytest.mark.timeout(240)


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(300_000.0) * step, "b": np.full(3, step), "step": step}


def same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("kind", ["text", "epath"])
def test_a_manager_keeps_the_last_steps(environ: Server, kind: str) -> None:
    root: Any = f"{environ.url()}/run"
    if kind == "epath":
        root = pytest.importorskip("etils.epath").Path(root)

    options = v0.CheckpointManagerOptions(max_to_keep=2)
    with v0.CheckpointManager(root, options=options) as manager:
        for step in (1, 2, 3):
            manager.save(
                step,
                args=v0.args.Composite(
                    state=v0.args.StandardSave(state(step)), config=v0.args.JsonSave({"step": step})
                ),
            )

        manager.wait_until_finished()
        assert list(manager.all_steps()) == [2, 3]
        found = manager.restore(
            3,
            args=v0.args.Composite(state=v0.args.StandardRestore(state(0)), config=v0.args.JsonRestore()),
        )
        same(found.state, state(3))
        assert found.config == {"step": 3}


def test_the_newer_api_saves_replaces_and_loads(environ: Server) -> None:
    root = f"{environ.url()}/run"
    with v1.training.Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(1, state(2), overwrite=True, force=True)
        same(checkpointer.load(1, state(0)), state(2))

    v1.save(f"{root}-one", state(3))
    same(v1.load(f"{root}-one"), state(3))
