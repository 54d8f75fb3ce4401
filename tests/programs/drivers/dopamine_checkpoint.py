"""Dopamine: a handler of its own, for objects that become dictionaries, in msgpack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.programs.program import Program

PROGRAM = Program("Dopamine, `jax.checkpointers`", wheels=("dopamine-rl==4.1.2", "msgpack==1.1.0"))


class Agent:
    """What an agent of Dopamine is for its checkpointer."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def to_state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def from_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict["values"]


def _manager(directory: Path) -> Any:
    from dopamine.jax import checkpointers
    from orbax import checkpoint

    return checkpoint.CheckpointManager(directory / "run", checkpointers=checkpointers.Checkpointer())


def save(directory: Path) -> Mapping[str, object]:
    """Save two steps, in the style from before Orbax had arguments."""
    manager = _manager(directory)
    saved = [manager.save(step, Agent(np.arange(4) + step)) for step in (1, 2)]
    return {"saved": saved, "steps": manager.all_steps(), "agent": np.arange(4) + 2}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore into an agent, and without one."""
    manager = _manager(directory)
    return {
        "agent": manager.restore(2, Agent(None)).values,
        "dictionary": manager.restore(1),
        "latest": manager.latest_step(),
    }
