"""What is told to `jax.monitoring`, by the same script on both libraries."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint
import pytest

import penstock.orbax

LIBRARIES = (orbax.checkpoint, penstock.orbax)
SAVE = {
    "/jax/orbax/write/start",
    "/jax/orbax/write/blocking_duration_secs",
    "/jax/orbax/write/blocking_tree_map_duration_secs",
    "/jax/orbax/write/blocking_d2h_duration_secs",
    "/jax/orbax/write/total_duration_secs",
    "/jax/orbax/write/success",
}
ASYNC_SAVE = {
    "/jax/orbax/write/async/start",
    "/jax/orbax/write/blocking_wait_prev_duration_secs",
    "/jax/orbax/write/blocking_tree_map_duration_secs",
    "/jax/orbax/write/blocking_d2h_duration_secs",
    "/jax/orbax/write/async/blocking_duration_secs",
    "/jax/checkpoint/write/async/blocking_duration_secs",
    "/jax/orbax/write/background_ts_duration_secs",
    "/jax/orbax/write/background_finalize_secs",
    "/jax/orbax/write/background_duration_secs",
    "/jax/orbax/write/async/total_duration_secs",
    "/jax/checkpoint/write/async/total_duration_secs",
    "/jax/orbax/write/success",
}
RESTORE = {
    "/jax/orbax/read/start",
    "/jax/orbax/read/blocking_duration_secs",
    "/jax/orbax/read/total_duration_secs",
    "/jax/orbax/read/success",
}


@contextmanager
def listening() -> Generator[dict[str, float | None]]:
    """Collect what is told of checkpoints: name -> seconds, or None of what has no duration."""
    told: dict[str, float | None] = {}
    monitoring = cast("Any", jax.monitoring)

    def on_event(name: str, **_: Any) -> None:
        if name.startswith(("/jax/orbax/", "/jax/checkpoint/")):
            told.setdefault(name, None)

    def on_duration(name: str, seconds: float, **_: Any) -> None:
        if name.startswith(("/jax/orbax/", "/jax/checkpoint/")):
            told[name] = seconds

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield told
    finally:
        monitoring.unregister_event_listener(on_event)
        monitoring.unregister_event_duration_listener(on_duration)


def tree() -> dict[str, Any]:
    return {"w": np.arange(12.0), "n": np.ones(3)}  # Orbax warns of jax.Arrays without shardings


@pytest.mark.parametrize("ocp", LIBRARIES, ids=["orbax", "penstock"])
def test_a_save_and_a_restore(ocp: Any, tmp_path: Path) -> None:
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    with listening() as saved:
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave(tree()))
    with listening() as restored:
        checkpointer.restore(tmp_path / "a")

    assert saved.keys() >= SAVE
    assert restored.keys() >= RESTORE
    blocked, total = (saved[f"/jax/orbax/write/{part}_duration_secs"] for part in ("blocking", "total"))
    assert blocked
    assert total
    assert blocked <= total
    checkpointer.close()


@pytest.mark.parametrize("ocp", LIBRARIES, ids=["orbax", "penstock"])
def test_a_save_in_the_background(ocp: Any, tmp_path: Path) -> None:
    with listening() as told, ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave(tree()))
        checkpointer.wait_until_finished()

    assert told.keys() >= ASYNC_SAVE
    background = "/jax/orbax/write/background"
    parts = [told[f"{background}_{part}_secs"] for part in ("ts_duration", "finalize", "duration")]
    written, finalized, whole = (part or 0.0 for part in parts)
    assert 0 < max(written, finalized) <= whole <= (told["/jax/orbax/write/async/total_duration_secs"] or 0.0)


@pytest.mark.parametrize("ocp", LIBRARIES, ids=["orbax", "penstock"])
def test_items_of_a_composite(ocp: Any, tmp_path: Path) -> None:
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    with listening() as told:
        checkpointer.save(tmp_path / "a", args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree())))

    assert told["/jax/orbax/write/background_item_finalize_secs"]
    checkpointer.close()


@pytest.mark.parametrize("ocp", LIBRARIES, ids=["orbax", "penstock"])
def test_no_success_is_reported_for_a_failed_operation(ocp: Any, tmp_path: Path) -> None:
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    with listening() as told:
        with pytest.raises(ValueError, match="empty"):
            checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave({}))
        with pytest.raises(FileNotFoundError):
            checkpointer.restore(tmp_path / "nothing")

    assert told.keys() >= {"/jax/orbax/write/start"}
    assert not [name for name in told if name.endswith(("success", "total_duration_secs"))]
    checkpointer.close()


@pytest.mark.parametrize("kind", ["save", "async", "restore"])
def test_only_events_of_orbax_are_reported(kind: str, tmp_path: Path) -> None:
    told: list[set[str]] = []
    for number, ocp in enumerate(cast("tuple[Any, Any]", LIBRARIES)):
        path = tmp_path / str(number)
        handler = ocp.PyTreeCheckpointHandler()
        checkpointer = ocp.AsyncCheckpointer(handler) if kind == "async" else ocp.Checkpointer(handler)
        args = ocp.args.PyTreeSave(tree())
        if kind == "restore":
            checkpointer.save(path, args=args)
        with listening() as found:
            if kind == "restore":
                checkpointer.restore(path)
            else:
                checkpointer.save(path, args=args)
            if kind == "async":
                checkpointer.wait_until_finished()

        checkpointer.close()
        told.append(set(found))

    theirs, ours = told
    assert ours
    assert ours <= theirs
