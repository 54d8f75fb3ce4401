"""`_METADATA` as Orbax and penstock write it, read without a JSON tree of it.

`json.loads` makes five dicts and a list of each leaf, and it is not the parser that this costs time
in but the garbage collector, which walks them all. Every known version writes one form, member for
member and blank for blank; a document of any other form is left to the JSON parser.

Source:
    ORBAX_FORMAT.md §1.1; the checkpoints of ten versions, all of this form.
"""

from __future__ import annotations

__all__ = ("KINDS", "Columns", "scan")

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, cast, final

from penstock.handlers.formats.common.json_slices import slices
from penstock.kernel.protocols.leaf import KeyKind, KeyPath

KINDS: Final = {1: KeyKind.SEQUENCE, 2: KeyKind.MAPPING}

_START: Final = '{"tree_metadata": {'
_END: Final = "}}}, "  # of the last entry, and of them all; in a string it would not go on as JSON
_BETWEEN: Final = '}}, "'
_TEXT: Final = r'[^"\\\x00-\x1f]*'
_ENTRY: Final = re.compile(
    rf'("({_TEXT})": \{{"key_metadata": \[(?:\{{"key": "([^]\\\x00-\x1f]*)\}})?\], '
    rf'"value_metadata": \{{"value_type": "({_TEXT})", "skip_deserialize": (true|false)'
    r'(?:, "write_shape": (\[[0-9, ]*\]))?\}\})(?:, |$)'
)
# What lies between the quotes of a path beside the keys.
_KINDS_OF_PATH: Final = re.compile(r", \|key_type\|: [12](?:\}, \{\|key\|: \|, \|key_type\|: [12])*")
_STRIDE: Final = 6


@final
class Columns(NamedTuple):
    """What the document says of each leaf, one list for each thing said."""

    keys: list[KeyPath]
    kinds: list[tuple[KeyKind, ...]]
    typestrs: list[str]
    write_shapes: list[tuple[int, ...] | None]
    skips: list[bool]


def scan(data: bytes) -> tuple[Columns, dict[str, object]] | None:
    """Read a document of the usual form.

    Returns:
        The entries, and the members beside them; or None if the form is another one, well or ill.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if not text.startswith(_START):
        return None

    end = text.find(_END)
    if end < 0:
        return None

    columns = Columns([], [], [], [], [])
    names: set[str] = set()
    kinds: dict[str, tuple[KeyKind, ...]] = {}
    shapes: dict[str, tuple[int, ...] | None] = {"": None}
    for part in slices(text, len(_START), end + 2, _BETWEEN, 2):
        found = _ENTRY.findall(part)
        whole, some, paths, typestrs, skips, texts = zip(*found, strict=True) if found else ((),) * 6
        if sum(map(len, whole)) + 2 * len(whole) != len(part) + 2 or not _add_paths(columns, paths, kinds):
            return None

        for shape in set(texts) - shapes.keys():
            shapes[shape] = _shape(shape)
            if shapes[shape] is None:
                return None

        names.update(some)
        columns.typestrs.extend(typestrs)
        columns.write_shapes.extend(map(shapes.__getitem__, texts))
        columns.skips.extend([skip == "true" for skip in skips])

    rest = _object("{" + text[end + len(_END) :])
    # Of two members of one name, a JSON parser keeps the last.
    if rest is None or "tree_metadata" in rest or len(names) < len(columns.keys):
        return None

    return columns, rest


def _add_paths(columns: Columns, paths: Iterable[str], kinds_of: dict[str, tuple[KeyKind, ...]]) -> bool:
    """Take paths such as `a", "key_type": 2}, {"key": "b", "key_type": 1` apart, keys from the rest."""
    for path in paths:
        if not path:
            columns.keys.append(())
            columns.kinds.append(())
            continue

        words = path.split('"')
        keys = tuple(words[::_STRIDE])
        del words[::_STRIDE]
        rest = "|".join(words)
        kinds = kinds_of.get(rest)
        if kinds is None:
            if not _KINDS_OF_PATH.fullmatch(rest):
                return False

            kinds = kinds_of[rest] = tuple([KINDS[int(digit)] for digit in re.findall("[12]", rest)])

        columns.keys.append(keys)
        columns.kinds.append(kinds)

    return True


def _shape(text: str) -> tuple[int, ...] | None:
    try:
        return tuple(cast("list[int]", json.loads(text)))
    except ValueError:
        return None


def _object(text: str) -> dict[str, object] | None:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None

    return cast("dict[str, object]", found) if type(found) is dict else None
