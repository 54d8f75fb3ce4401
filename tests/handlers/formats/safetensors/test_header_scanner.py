"""Headers of the usual form, read without a JSON tree of them: the same is found, or nothing is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.handlers.formats.safetensors.header import encode_header, read_header
from penstock.handlers.formats.safetensors.header_scanner import Tensor, scan
from penstock.handlers.stores.local import LocalStore

Row = tuple[str, str, tuple[int, ...], int, int]


def distinct(pairs: list[tuple[str, object]]) -> object:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("twice")

    return dict(pairs)


def found_in(text: str, start: int = 8, nbytes: int = 0) -> Any:
    return scan(text, start, start + nbytes, distinct)


A = '"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}'
B = '"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}'
TENSORS = (Tensor("a", "float32", (2, 1), 8, 8), Tensor("b", "bfloat16", (), 16, 2))


def test_tensors_and_metadata() -> None:
    assert found_in(f"{{{A},{B}}}", nbytes=10) == (TENSORS, None)
    assert found_in(f"{{{A},{B}}}   ", nbytes=10) == (TENSORS, None)
    metadata = '{"k":"a \\"quoted\\" ]},\\" text","l":"2"}'
    assert found_in(f'{{"__metadata__":{metadata},{A},{B}}}', nbytes=10) == (TENSORS, json.loads(metadata))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        f"{{{A}}}",
        f"{{{A},}}",
        f"{{{A},{B},}}",
        f"{{,{A},{B}}}",
        f"{{{A}{B}}}",
        f"{{{A},{B}",
        f"[{A},{B}]",
        f"{{{B},{A}}}",
        f"{{{A},{A}}}",
        f"{{{A},{B}}} x",
        f"{{{A}, {B}}}",
        f"{{{A},{B}}}".replace("[2,1]", "[2,01]"),
        f"{{{A},{B}}}".replace("[2,1]", "[2,1,]"),
        f"{{{A},{B}}}".replace("[2,1]", "[3]"),
        f"{{{A},{B}}}".replace("F32", "F4"),
        f"{{{A},{B}}}".replace("[8,10]", "[9,11]"),
        f"{{{A},{B}}}".replace("[8,10]", "[8,11]"),
        f"{{{A},{B}}}".replace("[8,10]", "[7,10]"),
        f"{{{A},{B}}}".replace('"b"', '"a"'),
        f"{{{A},{B}}}".replace('"b"', '"__metadata__"'),
        f"{{{A},{B}}}".replace('"b"', '"\\u0062"'),
        f"{{{A},{B}}}".replace('"dtype"', '"more":1,"dtype"'),
        f'{{"__metadata__":{{"k":"v","k":"w"}},{A},{B}}}',
        f'{{"__metadata__":{{"k":}},{A},{B}}}',
        f'{{"__metadata__":{{}}{A},{B}}}',
        '{"__metadata__":{}}',
        '{"__metadata__":' + "[" * 100_000,
    ],
)
def test_anything_else_is_left_to_the_parser(text: str) -> None:
    assert found_in(text, nbytes=10) is None


def test_bytes_beyond_the_tensors_are_left_to_the_parser() -> None:
    assert found_in(f"{{{A},{B}}}", nbytes=11) is None
    assert found_in(f"{{{A},{B}}}", nbytes=9) is None


def test_a_long_header_is_read_in_slices() -> None:
    rows: list[Row] = [(f"layer.{at}", "float32", (at % 3, 2), 0, 0) for at in range(5000)]
    end = 0
    for at, (name, dtype, shape, _, _) in enumerate(rows):
        rows[at] = (name, dtype, shape, end, end + 8 * shape[0])
        end += 8 * shape[0]

    head = encode_header(rows, {"format": "pt"})
    found = found_in(head[8:].decode(), len(head), end)

    assert [(t.name, t.dtype, t.shape, t.offset - len(head)) for t in found[0]] == [row[:4] for row in rows]
    assert found[1] == {"format": "pt"}


names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")


@given(
    st.dictionaries(names, st.lists(st.integers(0, 3), max_size=3), max_size=5),
    st.dictionaries(names, names, max_size=2),
)
def test_blanks_make_no_difference(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], metadata: dict[str, str]
) -> None:
    document: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        nbytes = 1
        for n in shape:
            nbytes *= n
        document[name] = {"dtype": "U8", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes

    both = []
    folder: Path = tmp_path_factory.mktemp("both")
    for separators in ((",", ":"), (", ", ": ")):
        text = json.dumps(document, separators=separators, ensure_ascii=False).encode()
        path = folder / "a.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
        header = read_header(LocalStore(), str(path))
        tensors = [tensor._replace(offset=tensor.offset - 8 - len(text)) for tensor in header.tensors]
        both.append((tensors, header.metadata))

    assert both[0] == both[1]
