"""What is printed, and how."""

from __future__ import annotations

import io

import pytest

from penstock.cli.terminal import Output, PipedOutput, PlainOutput, Table, in_options
from penstock.inspection.texts import one_line, printable, width_of

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
