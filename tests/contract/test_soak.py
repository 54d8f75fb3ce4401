"""The soak for a short while: so many steps of one seed, on each event loop. `make soak` goes on longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.soak import Steps, soak

STEPS = 100


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_course_of_saves_cancels_failures_and_restores(folder: Path, seed: int) -> None:
    folder.mkdir()
    steps = Steps()
    try:
        done = soak(folder, seed, lambda n_steps: n_steps < STEPS, steps)
    except BaseException as error:
        error.add_note("\n".join([f"seed {seed}", *list(steps)[-100:]]))
        raise

    assert done.total() == 2 * STEPS
    assert len(done) == 8
