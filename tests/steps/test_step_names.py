"""Names of steps, as Orbax gives and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import path as orbax_path

from penstock.errors import SpecError
from penstock.steps import AnyNames, NameFormat, StepNames

formats = st.builds(
    StepNames,
    prefix=st.one_of(st.none(), st.sampled_from(["step", "a_b", "0", "ckpt-", "x.y"])),
    digits=st.one_of(st.none(), st.integers(1, 12)),
)


@given(formats, st.integers(0, 10**18 - 1))
def test_a_name_is_read_back(names: StepNames, step: int) -> None:
    assert names.step(names.name(step)) == step


@given(formats, st.integers(0, 10**9))
def test_names_are_those_of_orbax(names: StepNames, step: int) -> None:
    orbax = orbax_path.step.standard_name_format(
        step_prefix=names.prefix, step_format_fixed_length=names.digits
    )

    assert names.name(step) == orbax.build_name(step)


def test_names_that_are_steps_for_orbax_are_steps(tmp_path: Path) -> None:
    candidates = [
        *("0", "00", "7", "07", "007", "0007", "00007", "12345", "012345", "-1", "+1", "1 ", "x", "1e3"),
        *("step_7", "step_07", "step_0007", "step_", "_7", "step7", "a_step_7", "step_12345", "\u0661"),
        *("7.orbax-checkpoint-tmp", "step_7.orbax-checkpoint-tmp-1", "metadata", "7x", "0x7"),
    ]
    for name in candidates:
        (tmp_path / name).mkdir()

    for names in (
        StepNames(),
        StepNames("step"),
        StepNames(digits=4),
        StepNames("step", 4),
        StepNames(digits=1),
    ):
        orbax = orbax_path.step.standard_name_format(
            step_prefix=names.prefix, step_format_fixed_length=names.digits
        )
        theirs = {found.path.name: found.step for found in orbax.find_all(tmp_path)}
        ours = {name: names.step(name) for name in candidates if names.step(name) is not None}
        assert ours == {name: step for name, step in theirs.items() if name.isascii()}


def test_several_ways_to_name_are_read_and_one_is_written() -> None:
    names: NameFormat = AnyNames([StepNames("step", 4), StepNames()])

    assert names.name(7) == "step_0007"
    assert [names.step(name) for name in ("step_0007", "7", "07", "x")] == [7, 7, None, None]


@pytest.mark.parametrize(
    ("formats", "given"),
    [
        ([], "none"),
        ("step", "'step'"),
        (StepNames(), "StepNames(prefix=None, digits=None)"),
        ([StepNames(), "step"], "'step'"),
        ([StepNames], "<class 'penstock.steps.step_names.StepNames'>"),
    ],
)
def test_names_without_a_format_say_what_they_need(formats: Any, given: str) -> None:
    with pytest.raises(SpecError, match="takes a list of the formats") as refused:
        AnyNames(formats)

    assert str(refused.value).endswith(f"AnyNames([StepNames(), StepNames('step')]); it was given {given}")


@pytest.mark.parametrize("bad", [{"prefix": "a/b"}, {"digits": 0}, {"digits": 19}, {"prefix": "a\0"}])
def test_what_cannot_be_a_name_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        StepNames(**bad)  # type: ignore[arg-type]  # each is one of its own
