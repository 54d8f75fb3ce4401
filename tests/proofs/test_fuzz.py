"""A few damaged inputs for every reader, in each run of the tests; `make fuzz` goes on for longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.proofs.fuzz_mutations import mutated
from tests.proofs.fuzz_targets import TARGETS, Seeds, checkpoint_seeds, document_seeds, run_target

from penstock.errors import PenstockError


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return document_seeds(checkpoint_seeds(tmp_path_factory.mktemp("seeds"), corpus=False))


@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_is_read(target: str, seeds: Seeds, tmp_path: Path) -> None:
    assert seeds[target]
    if target != "weights":  # the files that it names are not there
        assert [run_target(target, data, tmp_path / "work") for data in seeds[target]].count(None) > 0


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_leads_to_an_error_of_penstock_or_to_none(
    target: str, data: st.DataObject, seeds: Seeds, tmp_path: Path
) -> None:
    rng = data.draw(st.randoms(use_true_random=False))
    seed = data.draw(st.sampled_from(seeds[target]))
    found = run_target(target, mutated(rng, seed, seeds[target]), tmp_path / "work")

    assert found is None or isinstance(found, PenstockError)


def test_the_same_seed_makes_the_same_inputs() -> None:
    made = [mutated(random.Random(at), b'{"a": [1, 2, {"b": null}]}', ()) for at in range(200)]

    assert made == [mutated(random.Random(at), b'{"a": [1, 2, {"b": null}]}', ()) for at in range(200)]
    assert len(set(made)) > 100
