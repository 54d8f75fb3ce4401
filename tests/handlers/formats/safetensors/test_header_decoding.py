"""Headers are read in slices if they are of the usual form, as a whole if not, and to the same result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptCheckpointError
from penstock.handlers import LocalStore
from penstock.handlers.formats.safetensors.header import (
    FileHeader,
    Tensor,
    _decode_usual,
    decode_header,
    encode_header,
    read_header,
)
from penstock.handlers.formats.untrusted import UnusualFormError

Row = tuple[str, str, tuple[int, ...], int, int]

A = '"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}'
B = '"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}'
USUAL = f"{{{A},{B}}}"


def decoded(text: str, nbytes: int = 10) -> FileHeader:
    data = text.encode()
    return decode_header("p", data, 8 + len(data) + nbytes)


def is_usual(text: str) -> bool:
    try:
        _decode_usual(text.encode())
    except UnusualFormError:
        return False

    return True


def test_tensors_and_metadata() -> None:
    metadata = '{"k":"a \\"quoted\\" ]},\\" text","l":"2"}'
    for text, wanted in [
        (USUAL, {}),
        (f"{USUAL}   ", {}),
        (f'{{"__metadata__":{metadata},{A},{B}}}', json.loads(metadata)),
    ]:
        start = 8 + len(text)
        tensors = (Tensor("a", "float32", (2, 1), start, 8), Tensor("b", "bfloat16", (), start + 8, 2))
        assert is_usual(text)
        assert decoded(text) == FileHeader("p", tensors, wanted)


@pytest.mark.parametrize(
    "text",
    [
        f"{{{B},{A}}}",
        f"{{{A}, {B}}}",
        USUAL.replace('"b"', '"\\u0062"'),
        USUAL.replace('"dtype"', '"more":1,"dtype"'),
        f'{{"__metadata__":null,{A},{B}}}',
        f'{{{A},{B},"__metadata__":{{}}}}',
        f'{{{A},"__metadata__":{{}},{B}}}',
    ],
)
def test_a_sound_header_of_another_form_is_read(text: str) -> None:
    tensors = {(t.name, t.dtype, t.shape, t.offset - 8 - len(text), t.nbytes) for t in decoded(text).tensors}
    assert tensors == {("a", "float32", (2, 1), 0, 8), ("b", "bfloat16", (), 8, 2)}
    assert not decoded(text).metadata


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{}", "10 bytes that belong to no tensor"),
        (f"{{{A}}}", "2 bytes that belong to no tensor"),
        (f"{{{A},}}", "not JSON"),
        (f"{{{A},{B},}}", "not JSON"),
        (f"{{,{A},{B}}}", "not JSON"),
        (f"{{{A}{B}}}", "not JSON"),
        (f"{{{A},{B}", "not JSON"),
        (f"[{A},{B}]", "not JSON"),
        (f"{{{A},{A}}}", "'a' occurs twice"),
        (f"{USUAL} x", "not JSON"),
        (USUAL.replace("[2,1]", "[2,01]"), "not JSON"),
        (USUAL.replace("[2,1]", "[2,1,]"), "not JSON"),
        (USUAL.replace("[2,1]", "[3]"), "takes 12 bytes, not 8"),
        (USUAL.replace("[8,10]", "[9,11]"), "leaves a hole after those of 'a'"),
        (USUAL.replace("[8,10]", "[8,11]"), "takes 2 bytes, not 3"),
        (USUAL.replace("[8,10]", "[7,9]"), "overlaps those of 'a'"),
        (USUAL.replace('"b"', '"a"'), "'a' occurs twice"),
        (USUAL.replace('"dtype"', '"dtype":"F32","dtype"'), "'dtype' occurs twice"),
        (USUAL.replace('"shape"', '"shape":[],"shape"'), "'shape' occurs twice"),
        (f'{{"__metadata__":{{"k":"v","k":"w"}},{A},{B}}}', "'k' occurs twice"),
        (f'{{"__metadata__":{{"k":"v"}},"__metadata__":{{"k":"w"}},{A},{B}}}', "'__metadata__' occurs twice"),
        (f'{{"__metadata__":{{"k":"v"}},{A},"__metadata__":{B[4:]}}}', "'__metadata__' occurs twice"),
        (f'{{"__metadata__":{{"k":}},{A},{B}}}', "not JSON"),
        (f'{{"__metadata__":{{}}{A},{B}}}', "not JSON"),
        ('{"__metadata__":{}}', "10 bytes that belong to no tensor"),
        ('{"__metadata__":' + "[" * 100_000, "not JSON"),
    ],
)
def test_damage_is_named(text: str, said: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=said):
        decoded(text)


def test_a_long_header_is_read_in_slices() -> None:
    rows: list[Row] = [(f"layer.{at}", "float32", (at % 3, 2), 0, 0) for at in range(5000)]
    end = 0
    for at, (name, dtype, shape, _, _) in enumerate(rows):
        rows[at] = (name, dtype, shape, end, end + 8 * shape[0])
        end += 8 * shape[0]

    head = encode_header(rows, {"format": "pt", "penstock": json.dumps({"a": ["}", "x"]})})
    found = decode_header("p", head[8:], len(head) + end)

    assert is_usual(head[8:].decode())
    assert [(t.name, t.dtype, t.shape, t.offset - len(head)) for t in found.tensors] == [
        row[:4] for row in rows
    ]
    assert found.metadata == {"format": "pt", "penstock": '{"a": ["}", "x"]}'}

    with pytest.raises(CorruptCheckpointError, match=r"'layer.0' occurs twice"):
        decode_header("p", head[8:].replace(b'"layer.4999"', b'"layer.0"'), len(head) + end)


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
