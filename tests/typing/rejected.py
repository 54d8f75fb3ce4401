"""What checkers reject: each line with a `type: ignore`. Only type-checked, never run.

`make lint` is the test: both checkers report an ignore that ignores nothing.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import Any

import jax

import penstock

State = dict[str, jax.Array]


async def awaited(checkpointer: penstock.Checkpointer, state: State, shapes: Any) -> None:
    penstock.Checkpointer(memory_limits=1)  # type: ignore[call-arg]
    penstock.CheckpointManager("a", memory_limits=1)  # type: ignore[call-arg]
    await penstock.save("a", state, overwriting=True)  # type: ignore[call-arg]
    await checkpointer.save("a", state, stage="copy")  # type: ignore[call-arg]
    await checkpointer.save("a", state, staging="eager")  # type: ignore[arg-type]
    await penstock.restore("a", lik=state)  # type: ignore[call-overload]
    await penstock.restore("a", like=state, renam={})  # type: ignore[call-overload]
    await checkpointer.restore("a", mmap="yes")  # type: ignore[call-overload]
    await checkpointer.restore("a", on_missing="ignore")  # type: ignore[call-overload]
    await checkpointer.restore_items("a", item="b")  # type: ignore[call-arg]
    checkpointer.stream("a", orders=["b"])  # type: ignore[call-arg]
    await penstock.convert("a", "b", memory_limits=1)  # type: ignore[call-arg]
    await penstock.export_safetensors(state, "b", shard_bytes=1)  # type: ignore[call-arg]
    penstock.watch("a", timeout=1)  # type: ignore[call-arg]
    text: str = await penstock.restore("a", like=state)  # type: ignore[arg-type]
    text = await penstock.restore("a", like=shapes, as_type=State)  # type: ignore[arg-type]
    text = await penstock.restore("a", like=shapes)
    text.upper()


def blocking(
    checkpointer: penstock.sync.Checkpointer, manager: penstock.sync.CheckpointManager, state: State
) -> None:
    penstock.sync.Checkpointer(memory_limits=1)  # type: ignore[call-arg]
    penstock.sync.CheckpointManager("a", keeps=1)  # type: ignore[call-arg]
    penstock.sync.save("a", state, overwriting=True)  # type: ignore[call-arg]
    checkpointer.save("a", state, overwriting=True)  # type: ignore[call-arg]
    checkpointer.restore("a", likes=state)  # type: ignore[call-overload]
    penstock.sync.restore("a", likes=state)  # type: ignore[call-overload]
    manager.save(1, state, metric={})  # type: ignore[call-arg]
    manager.restore(like=state, item=1)  # type: ignore[call-overload]
    manager.watch(timeout=1)  # type: ignore[call-arg]
    penstock.sync.convert("a", "b", formats="orbax")  # type: ignore[call-arg]
    _ = penstock.typo  # type: ignore[attr-defined]
