"""What checkers know of the result of a restore. Only type-checked, never run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

import jax

import penstock


@dataclass
class State:
    weights: jax.Array
    step: int


class Tree(TypedDict):
    weights: jax.Array


async def awaited(
    checkpointer: penstock.Checkpointer,
    manager: penstock.CheckpointManager,
    state: State,
    struct: jax.ShapeDtypeStruct,
    structs: dict[str, jax.ShapeDtypeStruct],
) -> None:
    assert_type(await penstock.restore("a"), Any)
    assert_type(await penstock.restore("a", like=...), Any)
    assert_type(await checkpointer.restore("a"), Any)
    assert_type(await manager.restore(), Any)

    assert_type(await penstock.restore("a", like=state), State)
    assert_type(await checkpointer.restore("a", like=state, mmap=True), State)
    assert_type(await manager.restore(like=state), State)
    assert_type(await manager.restore(7, like={"a": 1}), dict[str, int])

    assert_type(await penstock.restore("a", like=struct), jax.Array)
    assert_type(await checkpointer.restore("a", like=struct), jax.Array)
    assert_type(await manager.restore(like=struct), jax.Array)

    assert_type(await penstock.restore("a", like=State), State)
    assert_type(await checkpointer.restore("a", like=State), State)
    assert_type(await manager.restore(like=State), State)

    shapes = jax.eval_shape(lambda: state)  # pyright: ignore[reportUnknownMemberType]  # jax names no type
    assert_type(await penstock.restore("a", like=shapes), Any)
    assert_type(await checkpointer.restore("a", like=shapes), Any)
    assert_type(await manager.restore(like=shapes), Any)

    assert_type(await penstock.restore("a", like=shapes, as_type=State), State)
    assert_type(await checkpointer.restore("a", like=structs, as_type=Tree), Tree)
    assert_type(await manager.restore(like=structs, as_type=dict[str, jax.Array]), dict[str, jax.Array])
    assert_type(await penstock.restore("a", as_type=dict), dict[Any, Any])


def blocking(
    checkpointer: penstock.sync.Checkpointer,
    manager: penstock.sync.CheckpointManager,
    state: State,
    struct: jax.ShapeDtypeStruct,
    structs: dict[str, jax.ShapeDtypeStruct],
) -> None:
    assert_type(penstock.sync.restore("a"), Any)
    assert_type(checkpointer.restore("a"), Any)
    assert_type(manager.restore(), Any)
    assert_type(penstock.sync.restore("a", like=state), State)
    assert_type(checkpointer.restore("a", like=state), State)
    assert_type(manager.restore(like=state), State)
    assert_type(penstock.sync.restore("a", like=struct), jax.Array)
    assert_type(checkpointer.restore("a", like=State), State)
    assert_type(manager.restore(like=structs, as_type=State), State)

    assert_type(penstock.sync.save("a", state), penstock.SaveReport)
    assert_type(checkpointer.save("a", state), penstock.SaveFuture)
    assert_type(manager.save(1, state), penstock.SaveFuture | None)
    assert_type(penstock.sync.convert("a", "b"), penstock.SaveReport)
    assert_type(manager.best_step("loss"), int | None)
