"""Rules as data: their patterns, their tables, their inverses, and what is no rule."""

from __future__ import annotations

import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from penstock.errors import SpecError
from penstock.kernel.rules import RULES, Pattern, parse_rules
from penstock.rules import (
    Cast,
    Concat,
    Constant,
    Dequantize,
    Drop,
    Pad,
    Rename,
    Repeat,
    Reshape,
    Rule,
    Rules,
    Select,
    Split,
    Stack,
    Transpose,
    Unstack,
    load_rules,
)


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("a.b", "a.b", {}),
        ("a.b", "a.c", None),
        ("a.{x}.c", "a.b.c", {"x": "b"}),
        ("a.{x}.c", "a.b.b.c", None),
        ("l{i:int}.w", "l10.w", {"i": "10"}),
        ("l.{i:int}", "l.01", None),
        ("l.{i:int}", "l.x", None),
        ("{rest...}.w", "a.b.c.w", {"rest": "a.b.c"}),
        ("{rest...}.w", "w", None),
        ("{x}.{x}", "a.a", {"x": "a"}),
        ("{x}.{x}", "a.b", None),
        ("*.w", "a.w", {}),
        ("*.w", "a.b.w", None),
        ("**", "a.b.w", {}),
        ("a[0].{x}", "a[0].b", {"x": "b"}),
    ],
)
def test_a_pattern_fits_whole_names_and_says_what_its_groups_stand_for(
    pattern: str, name: str, found: dict[str, str] | None
) -> None:
    assert Pattern(pattern).match(name) == found
    if found is not None and "*" not in pattern:
        assert Pattern(pattern).fill(found) == name


@pytest.mark.parametrize("pattern", ["", "a.{", "a.{x:float}", "{1}", "a}", "{i}.{i:int}"])
def test_what_is_no_pattern_is_an_error(pattern: str) -> None:
    with pytest.raises(SpecError, match="pattern"):
        Pattern(pattern)


@pytest.mark.parametrize("kind", RULES.values(), ids=list(RULES))
def test_the_example_of_each_rule_is_one(kind: type[Rule]) -> None:
    (rule,) = parse_rules(tomllib.loads(f"[[rule]]\n{kind.example}"))
    assert type(rule) is kind
    assert parse_rules(tomllib.loads(Rules([rule]).text)) == Rules([rule])


INVERSES = [
    (Rename("a.{i}.x", "b.{i}"), Rename("b.{i}", "a.{i}.x")),
    (
        Cast("a", dtype="float64", from_dtype="float32", max_cast_error=0),
        Cast("a", dtype="float32", from_dtype="float64", max_cast_error=0),
    ),
    (Transpose("a", "b", axes=(2, 0, 1)), Transpose("b", "a", axes=(1, 2, 0))),
    (Transpose("a"), Transpose("a")),
    (Reshape("a", shape=(2, -1), from_shape=(6,)), Reshape("a", shape=(6,))),
    (Split("a", ["b", "c"], axis=1), Concat(["b", "c"], "a", axis=1, sizes="equal")),
    (Split("a", ["b", "c"], sizes=(1, 2)), Concat(["b", "c"], "a", sizes=(1, 2))),
    (Concat(["b", "c"], "a", sizes="equal"), Split("a", ["b", "c"])),
    (Stack("l.{i:int}.w", "l.w", axis=1), Unstack("l.w", "l.{i:int}.w", axis=1)),
    (Unstack("l.w", ["a", "b"]), Stack(["a", "b"], "l.w")),
    (Pad("a", axis=1, to_size=8, from_size=5), Select("a", axis=1, stop=5)),
    (Repeat("a", "b", axis=1, times=3), Select("b", "a", axis=1, step=3)),
    (Constant("a", value=2, shape=(2,)), Drop("a")),
]


@pytest.mark.parametrize(("rule", "inverse"), INVERSES)
def test_a_rule_knows_its_inverse(rule: Rule, inverse: Rule) -> None:
    assert rule.inverse() == inverse


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (Cast("a", dtype="bfloat16"), "from_dtype"),
        (Cast("a", dtype="bfloat16", from_dtype="float32", max_cast_error=0.1), "exact"),
        (Reshape("a", shape=(2,)), "from_shape"),
        (Concat(["a", "b"], "c"), "sizes"),
        (Select("a", stop=2), "not there any more"),
        (Pad("a", to_size=3), "from_size"),
        (Dequantize("a", scales="b"), "quantized"),
        (Drop("a"), "not there any more"),
    ],
)
def test_a_rule_without_an_inverse_says_why(rule: Rule, reason: str) -> None:
    with pytest.raises(SpecError, match=f"^{rule.operation} = .* has no inverse: .*{reason}"):
        Rules([Rename("x", "y"), rule]).inverse()


def test_the_inverse_of_rules_is_in_the_reverse_order() -> None:
    rules = Rules([Rename("a", "b"), Rename("b", "c")], rest="keep")
    assert rules.inverse() == Rules([Rename("c", "b"), Rename("b", "a")], rest="keep")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({}, "one key says what is done"),
        ({"renam": "a", "to": "b"}, "did you mean 'rename'"),
        ({"rename": "a", "drop": "b"}, "one of rename and drop"),
        ({"rename": "a"}, "needs `to`"),
        ({"rename": "a", "to": "b", "axis": 1}, "rename has no 'axis'"),
        ({"transpose": "a", "axis": 1}, "did you mean 'axes'"),
        ({"rename": ["a", "b"], "to": "c"}, "one pattern, not 2"),
        ({"rename": 3, "to": "c"}, "not 3"),
        ({"rename": "a.{i}", "to": "b"}, "several leaves would have one name"),
        ({"rename": "a", "to": "b.{i}"}, "{i} is in `to` alone"),
        ({"rename": "a.*", "to": "b.*"}, "gives no name"),
        ({"transpose": "a", "axes": [0, 0]}, "order of 0 to 1"),
        ({"transpose": "a", "axes": [0.5]}, "integers"),
        ({"cast": "a"}, "needs dtype"),
        ({"cast": "a", "dtype": "float32", "max_cast_error": -1}, "at least 0"),
        ({"reshape": "a", "shape": [-1, -1]}, "one -1"),
        ({"split": "a", "to": ["b"]}, "names of the parts"),
        ({"split": "a", "to": ["b", "c"], "sizes": [1]}, "2 names in `to`, and 1 sizes"),
        ({"split": "a", "to": "b.{i:int}"}, "needs sizes"),
        ({"concat": ["a", "b"]}, "needs `to`"),
        ({"concat": "a", "to": "b"}, "joins the leaves of several patterns"),
        ({"concat": ["a.{i}", "b.{j}"], "to": "c.{i}"}, "different groups"),
        ({"stack": "a.{i}.w", "to": "a.w"}, "must be a number"),
        ({"unstack": "a"}, "needs `to`"),
        ({"select": "a", "step": 0}, "at least 1"),
        ({"select": "a", "indices": [1], "stop": 2}, "either indices"),
        ({"pad": "a"}, "needs to_size"),
        ({"repeat": "a"}, "needs times"),
        ({"dequantize": "a"}, "needs scales"),
        ({"dequantize": "a.{i}", "scales": "b"}, "groups of the source"),
        ({"dequantize": "a", "scales": "b", "format": "int3"}, "'scaled' or 'mxfp4'"),
        ({"dequantize": "a", "scales": "b", "block": [0]}, "at least 1"),
        ({"constant": "a.{i}"}, "name of one leaf"),
        ({"constant": "a", "shape": [-1]}, "at least 0"),
        ({"drop": "a", "to": "b"}, "no `to`"),
    ],
)
def test_a_table_that_is_no_rule_is_an_error_that_counts_to_it(
    table: dict[str, object], problem: str
) -> None:
    document = {"rule": [{"rename": "x", "to": "y"}, table]}
    with pytest.raises(SpecError) as raised:
        parse_rules(document, "rules.toml")

    assert str(raised.value).startswith("rules.toml: [[rule]] 2: ")
    assert problem in str(raised.value)


def test_a_file_of_rules_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('rest = "keep"\n[[rule]]\nstack = "l.{i:int}.w"\nto = "l.w"\noptional = true\n')
    assert load_rules(file) == Rules([Stack("l.{i:int}.w", "l.w", optional=True)], rest="keep")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[rule", "no TOML"),
        ('[rules]\nrename = "a"', "'rules' is not known"),
        ('[rule]\nrename = "a"', "two brackets"),
        ('rest = "drop"', "'error' or 'keep'"),
    ],
)
def test_a_file_without_rules_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(SpecError, match=problem):
        load_rules(file)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        load_rules(tmp_path / "none")


def test_dtypes_are_named_as_dtypes_are_given() -> None:
    given = ["bfloat16", np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16]
    assert {Cast("a", dtype=dtype).dtype for dtype in given} == {"bfloat16"}
    assert Cast("a", dtype=np.float32).dtype == "float32"


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(SpecError, match="not 'a'"):
        Rules(["a"])  # type: ignore[list-item]
    with pytest.raises(SpecError, match="sequence of rules"):
        Rules.of("a")  # type: ignore[arg-type]

    assert Rules.of(Rename("a", "b")) == Rules.of([Rename("a", "b")]) == Rules([Rename("a", "b")])
