"""Which step the parts that processes find make together, and which are of no use."""

from __future__ import annotations

from penstock.steps.joint_tiers import FoundPart, WholeStep, newest_whole, superseded


def part(
    step: int, process: int, save: str = "s", at: str = "", processes: tuple[int, ...] = (0, 1)
) -> FoundPart:
    return FoundPart(step, process, processes, save, at or f"/{process}/{step}")


def test_the_newest_step_of_which_all_parts_were_found() -> None:
    found = {
        0: [part(5, 1), part(6, 1), part(4, 0)],
        1: [part(5, 0), part(4, 1)],
    }
    assert newest_whole(found, 3) == WholeStep(5, (0, 1), {1: {0: "/0/5"}, 0: {1: "/1/5"}})
    assert newest_whole(found, 5) is None
    assert newest_whole({}, -1) is None


def test_parts_of_two_saves_make_no_step() -> None:
    assert newest_whole({0: [part(5, 0, "one")], 1: [part(5, 1, "other")]}, -1) is None
    found = {0: [part(5, 0, "one")], 1: [part(5, 1, "other"), part(5, 0, "other", "/copy")]}
    assert newest_whole(found, -1) == WholeStep(5, (0, 1), {1: {0: "/copy", 1: "/1/5"}})


def test_one_process_may_bring_all() -> None:
    found = {0: [part(5, index, processes=(0, 1, 2)) for index in (2, 0, 1)]}
    assert newest_whole(found, -1) == WholeStep(5, (0, 1, 2), {0: {0: "/0/5", 1: "/1/5", 2: "/2/5"}})


def test_a_part_that_two_have_is_brought_by_the_first_and_from_its_nearest_tier() -> None:
    found = {0: [part(5, 0, at="/memory"), part(5, 0, at="/disk")], 1: [part(5, 0), part(5, 1)]}
    assert newest_whole(found, -1) == WholeStep(5, (0, 1), {0: {0: "/memory"}, 1: {1: "/1/5"}})


def test_parts_go_that_a_newer_step_has_followed_or_of_which_another_is_lost() -> None:
    parts = [part(step, 0) for step in (3, 5, 7)]
    others = part(7, 3, processes=(0, 1, 2, 3))
    assert superseded([*parts, others], 5, (), (0, 1)) == [parts[0], parts[2]]
    assert superseded([*parts, others], 5, (5,), (0, 1)) == parts
    assert superseded([others], None, (), (0, 1)) == []
    assert superseded([others], 8, (), (0, 1)) == [others]
