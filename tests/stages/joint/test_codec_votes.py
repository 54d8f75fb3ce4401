"""Votes about the codec `auto`: how they are counted, and what becomes of the plan."""

from __future__ import annotations

import pytest

from penstock.errors import CoordinationError
from penstock.kernel import LeafSpec, ParamInfo, SavePlan
from penstock.stages.joint.codec_votes import (
    FIRST,
    MUST_BE_PLAIN,
    NO_VOTE,
    PLAIN,
    counted,
    undecided,
    with_codecs,
)

ENCODED, OTHERWISE = FIRST, FIRST + 1


@pytest.mark.parametrize(
    ("votes", "codec"),
    [
        ([ENCODED], 1),
        ([OTHERWISE], 2),
        ([PLAIN], 0),
        ([NO_VOTE], 0),
        ([ENCODED, NO_VOTE, NO_VOTE], 1),
        ([ENCODED, PLAIN], 0),
        ([ENCODED, PLAIN, ENCODED], 1),
        ([ENCODED, PLAIN, OTHERWISE], 1),
        ([OTHERWISE, PLAIN, OTHERWISE], 2),
        ([ENCODED, OTHERWISE, OTHERWISE, PLAIN], 2),
        ([ENCODED, ENCODED, MUST_BE_PLAIN], 0),
    ],
)
def test_a_codec_needs_a_majority_of_votes(votes: list[int], codec: int) -> None:
    assert counted([bytes([vote]) for vote in votes]) == bytes([codec])


def test_each_leaf_is_counted_by_itself() -> None:
    assert counted([bytes([ENCODED, PLAIN]), bytes([NO_VOTE, PLAIN])]) == bytes([1, 0])


def test_votes_about_other_leaves_are_refused() -> None:
    with pytest.raises(CoordinationError):
        counted([bytes([ENCODED]), bytes([ENCODED, PLAIN])])
    with pytest.raises(CoordinationError):
        with_codecs(plan_of(["auto"]), [0], b"", ["zstd:1"])


def test_what_is_decided_stands_in_the_plan_and_specs_stay_shared() -> None:
    plan = plan_of(["auto", None, "auto", "auto"])
    after = with_codecs(plan, undecided(plan), bytes([2, 0, 2]), ["blosc", "zstd:1"])

    assert [spec.codec for spec in after.specs] == ["zstd:1", None, None, "zstd:1"]
    assert after.specs[0] is after.specs[3]
    assert after.specs[1] is plan.specs[1]


def test_a_process_decides_alone_about_what_it_has_for_itself() -> None:
    assert undecided(plan_of(["auto", "auto"], own=[0])) == [1]


def plan_of(codecs: list[str | None], own: list[int] | None = None) -> SavePlan:
    shared = {codec: LeafSpec("np.ndarray", (4,), "float32", 4, (4,), codec=codec) for codec in codecs}
    infos = [
        ParamInfo((str(at),), (), f"['{at}']", own_from=1 if at in (own or []) else None)
        for at in range(len(codecs))
    ]
    return SavePlan(infos=infos, specs=[shared[codec] for codec in codecs], handlers=[])
