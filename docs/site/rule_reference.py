"""Writes docs/reference/rules.md from the declarations of the rules: `python docs/site/rule_reference.py`."""

from __future__ import annotations

__all__ = ("reference",)

import inspect
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

from penstock.errors import SpecError
from penstock.kernel.rules import RULES, parse_rules
from penstock.rules import Rule

PAGE = Path(__file__).parents[1] / "reference" / "rules.md"

HEAD = """# Rules

<!-- Written by docs/site/rule_reference.py from the declarations of the rules. -->

What becomes of the leaves of a checkpoint, one rule after another.
[Change checkpoints](../howto/change-checkpoints.md) says how they are written and carried out, and
[penstock.rules](api/rules.md) has them as classes of Python.

Every rule has the pattern of the leaves that it takes as the value of its own key, and may have `to`, the
new name, and `optional = true`, if it may find no leaf. Where `to` is left out, the result has the name of
the source.
"""


def reference() -> str:
    """Return the page."""
    return "\n".join([HEAD, *[_section(kind) for kind in RULES.values()]])


def _section(kind: type[Rule]) -> str:
    about, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
    described = {
        name: " ".join(text.split())
        for name, text in re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", attributes, re.MULTILINE | re.DOTALL)
    }
    own = [one for one in fields(kind) if one.name not in {"source", "to", "optional"}]
    rows = [f"| `{one.name}` | {_default(one.default)} | {described[one.name]} |" for one in own]
    table = ["| key | default | |", "| --- | --- | --- |", *rows, ""] if rows else []
    parts = [
        f"## {kind.operation}",
        "",
        about,
        "",
        *table,
        "```toml",
        "[[rule]]",
        kind.example,
        "```",
        "",
        _inverse(kind),
    ]
    return "\n".join([*parts, ""])


def _default(value: object) -> str:
    return "" if value in (None, MISSING, "", ()) else f"`{value}`"


def _inverse(kind: type[Rule]) -> str:
    (rule,) = parse_rules(tomllib.loads(f"[[rule]]\n{kind.example}"))
    try:
        return f"Its inverse: `{rule.inverse()}`"
    except SpecError as error:
        return f"It has no inverse: {str(error).partition(' has no inverse: ')[2]}."


if __name__ == "__main__":
    PAGE.write_text(reference())
