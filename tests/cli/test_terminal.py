"""What is printed, and how."""

from __future__ import annotations

import io
import re

import pytest

from penstock.cli.terminal import Output, PipedOutput, PlainOutput, Table, Toned, has_colours, in_options
from penstock.inspection.texts import bars, format_number, one_line, printable, width_of

TABLE = Table(("name", "figure"), [("a", "1"), ("longer", "100")])


def said_by(output: type[PlainOutput | PipedOutput], table: Table = TABLE) -> list[str]:
    stream = io.StringIO()
    output(stream).table(table)
    return stream.getvalue().splitlines()


def test_tables_for_people_line_up() -> None:
    assert said_by(PlainOutput) == [
        "name    figure",
        "------  ------",
        "a            1",
        "longer     100",
    ]


def test_wide_characters_line_up() -> None:
    lines = said_by(PlainOutput, Table(("name", "figure"), [("名前", "1"), ("e\u0301", "2")]))

    assert lines[2:] == ["名前       1", "e\u0301          2"]


WIDE = Table(
    ("name", "kind", "size", "much"),
    [("a", Toned("DAMAGED", "bad"), "1", "x" * 30), ("n" * 30, "", "100", "")],
    n_left=2,
    spare=("much", "size"),
)


@pytest.mark.parametrize(
    ("width", "heading", "left_out"),
    [
        (None, ["name", "kind", "size", "much"], ""),
        (100, ["name", "kind", "size", "much"], ""),
        (50, ["name", "kind", "size"], "no room for: much"),
        (24, ["name", "kind"], "no room for: much, size"),
    ],
)
def test_columns_that_do_not_fit_are_left_out_and_named(
    width: int | None, heading: list[str], left_out: str
) -> None:
    stream = io.StringIO()
    PlainOutput(stream, width=width).table(WIDE)

    lines = stream.getvalue().splitlines()
    assert lines[0].split() == heading
    assert (lines[-1] if left_out else "") == left_out
    assert all(width is None or len(line) <= max(width, 30) for line in lines)


def test_a_name_that_is_too_long_has_a_line_of_its_own_and_is_never_cut() -> None:
    stream = io.StringIO()
    PlainOutput(stream, width=24).table(Table(("name", "figure"), [("n" * 30, "1"), ("b", "2")]))

    assert stream.getvalue().splitlines() == [
        "name              figure",
        "----------------  ------",
        "n" * 30,
        "                       1",
        "b                      2",
    ]


def test_a_column_that_says_nothing_is_not_shown_to_people() -> None:
    table = Table(("name", "", "figure"), [("a", "", "1")], n_left=2)

    assert said_by(PlainOutput, table)[2] == "a          1"
    assert said_by(PipedOutput, table) == ["a\t\t1"]


def test_a_colour_repeats_what_a_word_says_and_moves_nothing() -> None:
    streams = [io.StringIO(), io.StringIO()]
    for stream, colours in zip(streams, (False, True), strict=True):
        PlainOutput(stream, colours=colours).table(WIDE)

    plain, coloured = (stream.getvalue() for stream in streams)
    assert "\x1b[1;31mDAMAGED\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),  # it is no terminal
        ({"CLICOLOR_FORCE": "1"}, True),
        ({"CLICOLOR_FORCE": "0"}, False),
        ({"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_follow_the_variables_that_everybody_has(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    for name in ("NO_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert has_colours(io.StringIO()) is expected


def test_facts_are_wrapped_between_and_never_within_them() -> None:
    stream = io.StringIO()
    PlainOutput(stream, width=20).note("loss 0.5 · accuracy 0.25 · " + "x" * 30)

    assert stream.getvalue().splitlines() == ["loss 0.5", "  accuracy 0.25", f"  {'x' * 30}"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1 / 3, "0.3333"),
        (123456.789, "1.235e5"),
        (1.25e-7, "1.25e-7"),
        (1.0, "1"),
        (65536, "65,536"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_four_digits(number: float, text: str) -> None:
    assert format_number(number) == text


def test_bars_are_as_wide_as_there_is_room() -> None:
    assert bars([0, 1, 8, 4], 4) == " ▁█▄"
    assert bars([0, 1, 8, 4], 2) == "▁█"
    assert bars([0, 0], 2) == "  "


def test_tables_for_programs_are_separated_by_tabs() -> None:
    assert said_by(PipedOutput) == ["a\t1", "longer\t100"]
    assert said_by(PipedOutput, Table(("name",), [("1 kB",)], plain=[("a\tb\nc", "1000")])) == [
        "a\\tb\\nc\t1000"
    ]


@pytest.mark.parametrize("output", [PlainOutput, PipedOutput])
def test_no_output_passes_control_characters_on(output: type[PlainOutput | PipedOutput]) -> None:
    stream = io.StringIO()
    made: Output = output(stream)
    evil = "\x1b[31m\x07\r\x9b1m\u202e\u2028"

    made.headline(evil)
    made.say(evil)
    made.success(evil)
    made.note(evil)
    made.table(Table((evil,), [(evil,)]))
    with made.bar(2) as bar:
        bar.show(1, evil)

    assert stream.getvalue().replace("\n", "").isprintable()


def test_escapes_are_those_of_python() -> None:
    assert one_line("a\x1b\u202e\nb") == "a\\x1b\\u202e\\nb"
    assert printable("a\nb\t") == "a\nb\\t"
    assert printable("naïve 名") == "naïve 名"
    assert width_of("名a") == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("'x' exists; pass overwrite=True to replace it", "'x' exists; give --overwrite to replace it"),
        ("convert one of them, as in item='default'", "convert one of them, as in --item default"),
        ("max_shard_bytes is for safetensors", "--max-shard-bytes is for safetensors"),
        ("run/max_shard_bytes: is no checkpoint", "run/max_shard_bytes: is no checkpoint"),
        ("leaf ['custom_metadata'] differs", "leaf ['custom_metadata'] differs"),
    ],
)
def test_errors_speak_of_options(text: str, said: str) -> None:
    assert in_options(text) == said
