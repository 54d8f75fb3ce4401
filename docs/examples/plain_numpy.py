"""NumPy arrays alone, of any dtype, and numbers and texts beside them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import penstock


def main(directory: Path) -> None:
    """Save, change, restore."""
    random = np.random.default_rng(0)
    state = {
        "table": random.standard_normal((100, 8)),
        "counts": np.arange(10, dtype=np.uint16),
        "mask": np.array([True, False]),
        "step": 7,
        "note": "before the change",
    }
    report = penstock.sync.save(directory / "state", state)
    before = state["table"].copy()
    state["table"] += 1  # what was saved is what it was

    restored = penstock.sync.restore(directory / "state", like=state)
    np.testing.assert_array_equal(restored["table"], before)
    assert isinstance(restored["counts"], np.ndarray)
    assert restored["counts"].dtype == np.uint16
    assert (restored["step"], restored["note"]) == (7, "before the change")
    print(f"{report.nbytes} bytes there and back")

    mapped = penstock.sync.restore(directory / "state", like=state, mmap=True)
    assert not mapped["table"].flags.writeable  # it is the page cache


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
