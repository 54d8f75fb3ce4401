"""Which replica writes what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel import LeafSpec, Replicas
from penstock.stages.joint.division import balanced


def spec(n: int, n_replicas: int = 4, *, is_global: bool = True, n_writers: int = 1) -> LeafSpec:
    return LeafSpec(
        "jax.Array",
        (n,),
        "float32",
        4,
        (n,),
        (n,),
        replicas=Replicas(n_replicas, n_writers, is_global),
    )


def written(specs: Sequence[LeafSpec], replicas_of_a_process: int) -> Counter[int]:
    nbytes: Counter[int] = Counter()
    for found in balanced(specs):
        assert found.replicas.writer is not None
        nbytes[found.replicas.writer // replicas_of_a_process] += found.nbytes

    return nbytes


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.sampled_from([1, 2, 4]))
def test_no_process_writes_more_than_another_by_more_than_its_largest_arrays(
    sizes: list[int], replicas_of_a_process: int
) -> None:
    found = written([spec(size, 8) for size in sizes], replicas_of_a_process)
    each = [found[process] for process in range(8 // replicas_of_a_process)]

    assert max(each) - min(each) <= 4 * max(sizes) * replicas_of_a_process


@pytest.mark.parametrize("n_processes", [2, 4])
def test_two_arrays_go_to_two_processes(n_processes: int) -> None:
    assert len(written([spec(8, 4), spec(8, 4)], 4 // n_processes)) == 2


def test_arrays_that_are_cut_or_are_one_process_s_own_stay_as_they_are() -> None:
    specs = [
        spec(8),
        spec(16, n_writers=4),
        spec(16, is_global=False),
        spec(16, n_replicas=1),
        spec(0),
        spec(8),
    ]
    found = balanced(specs)

    assert [one is other for one, other in zip(specs, found, strict=True)][1:5] == [True] * 4
    assert {found[0].replicas.writer, found[5].replicas.writer} == {0, 2}


def test_arrays_that_were_alike_and_go_to_one_replica_share_a_spec() -> None:
    one = spec(8)
    found = balanced([one] * 40)

    assert len({id(each) for each in found}) == 4
    assert all(each == one for each in found)
