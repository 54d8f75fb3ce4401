"""A sample of `make flips`: no flipped bit changes a value unnoticed where penstock wrote the checkpoint."""

from __future__ import annotations

import pytest
from tests.proofs.bit_flips import KINDS, Kind, count_flips


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.is_safe], ids=lambda kind: kind.name)
def test_no_flip_goes_unnoticed(kind: Kind) -> None:
    # All that safetensors hold is in one file, or in a few; items are in a hundred.
    per_file = 12 if kind.name.startswith("safetensors") else 1 if kind.name == "items" else 2
    found = count_flips(kind, per_file=per_file, seed=1, verify=False)

    assert found.flips > 10
    assert found.silent == 0
    assert found.found > found.harmless
