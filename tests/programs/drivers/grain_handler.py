"""Grain: the state of a data loader and of a dataset, as one item next to the state of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tests.programs.program import Program

PROGRAM = Program(
    "Grain, `PyGrainCheckpointHandler`", wheels=("grain==0.2.18", "array-record==0.8.3", "cloudpickle==3.1.2")
)


def _iterators() -> tuple[Any, Any]:
    import grain.python as grain

    source: Any = range(20)
    sampler = grain.IndexSampler(20, shard_options=grain.NoSharding(), shuffle=True, num_epochs=1, seed=3)
    loader = grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)
    dataset = grain.MapDataset.range(20).shuffle(seed=4).to_iter_dataset()
    return iter(loader), iter(dataset)


def _manager(directory: Path) -> Any:
    from orbax import checkpoint

    return checkpoint.CheckpointManager(directory, item_names=("state", "loader", "dataset"))


def save(directory: Path) -> Mapping[str, object]:
    """Save after some batches."""
    import grain.python as grain
    from orbax import checkpoint

    loader, dataset = _iterators()
    taken = [int(next(each)) for each in (loader, dataset) for _ in range(5)]
    items = checkpoint.args.Composite(
        state=checkpoint.args.StandardSave({"w": jnp.arange(4)}),
        loader=grain.PyGrainCheckpointSave(loader),
        dataset=grain.PyGrainCheckpointSave(dataset),
    )
    with _manager(directory) as manager:
        manager.save(5, args=items)
    files = sorted(path.read_text() for path in directory.rglob("process_*.json"))
    return {"taken": taken, "rest": [*map(int, loader), *map(int, dataset)], "contents": files}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore, and take the rest."""
    import grain.python as grain
    from orbax import checkpoint

    loader, dataset = _iterators()
    items = checkpoint.args.Composite(
        state=checkpoint.args.StandardRestore(),
        loader=grain.PyGrainCheckpointRestore(loader),
        dataset=grain.PyGrainCheckpointRestore(dataset),
    )
    with _manager(directory) as manager:
        found = manager.restore(5, args=items)
    return {"rest": [*map(int, found.loader), *map(int, found.dataset)], "state": found.state}
