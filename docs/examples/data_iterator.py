"""Where the data iterator stands, saved beside the model in the same step: no batch twice, none lost."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import penstock
from penstock.items import Json


class Batches:
    """Shuffled batches for ever, whose whole state is small and fits into JSON."""

    def __init__(self, n_rows: int, seed: int = 0) -> None:
        self.n_rows = n_rows
        self.state: dict[str, Any] = {"seed": seed, "epoch": 0, "at": 0}

    def __next__(self) -> np.ndarray:
        """Return the numbers of the next four rows."""
        order = np.random.default_rng((self.state["seed"], self.state["epoch"])).permutation(self.n_rows)
        at = self.state["at"]
        last = at + 4 >= self.n_rows
        self.state = {
            **self.state,
            "epoch": self.state["epoch"] + last,
            "at": 0 if last else at + 4,
        }
        return order[at : at + 4]


def main(directory: Path) -> None:
    """Train, stop in the middle of an epoch, go on, and see the rows that an unbroken run sees."""
    unbroken = Batches(n_rows=20)
    expected = [next(unbroken).tolist() for _ in range(12)]

    seen, batches, weights = [], Batches(n_rows=20), jnp.zeros(20)
    with penstock.sync.CheckpointManager(directory / "run") as manager:
        for step in range(7):
            rows = next(batches)
            seen.append(rows.tolist())
            weights = weights.at[rows].add(1.0)
            manager.save(step, penstock.Composite(model=weights, data=Json(batches.state)))

    with penstock.sync.CheckpointManager(directory / "run") as manager:
        found = manager.restore(like=penstock.Composite(model=jnp.zeros(20), data=...))
        batches, weights = Batches(n_rows=20), found["model"]
        batches.state = found["data"]
        for step in range(7, 12):
            rows = next(batches)
            seen.append(rows.tolist())
            weights = weights.at[rows].add(1.0)
            manager.save(step, penstock.Composite(model=weights, data=Json(batches.state)))

    assert seen == expected
    assert float(weights.sum()) == 48
    print("every batch once, in order")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
