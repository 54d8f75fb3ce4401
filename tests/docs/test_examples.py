"""The examples of the documentation run as they are printed. What they promise they assert themselves."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
NAMES = (
    "asyncio_loop",
    "data_iterator",
    "equinox_model",
    "flax_linen",
    "flax_nnx",
    "optax_state",
    "plain_loop",
    "plain_numpy",
    "stages_of_your_own",
)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    before = set(EXAMPLES.iterdir())
    with jax.numpy_dtype_promotion("standard"):  # as their readers have it
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        main(tmp_path)

    assert list(tmp_path.iterdir())
    assert set(EXAMPLES.iterdir()) - before <= {EXAMPLES / "__pycache__"}


def test_every_example_is_run() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if "def main(directory: Path)" in path.read_text()}
    assert scripts == set(NAMES)
