"""Documents of the usual form are read without a JSON tree, to the same result; others by the parser."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.handlers.formats.common import json_slices as slices
from penstock.handlers.formats.common.checked_json import as_object, parse_object
from penstock.handlers.formats.orbax.documents import array_metadatas
from penstock.handlers.formats.orbax.documents import metadata_scanner as quick_metadata
from penstock.handlers.formats.orbax.documents import sharding_document as sharding
from penstock.handlers.formats.orbax.documents import tree_metadata as metadata
from penstock.kernel.errors import CorruptCheckpointError

texts = st.one_of(
    st.sampled_from(["a", "b", "opt", "", "0", "}}, ", "}}}, x", "]", "[", "': {", "a.b", "}, {"]),
    st.text(max_size=5),
)
paths = st.lists(st.tuples(texts, st.integers(1, 2)), max_size=4)
shapes = st.one_of(st.none(), st.lists(st.integers(0, 10**6), max_size=3))
entries = st.lists(st.tuples(paths, texts, st.booleans(), shapes), max_size=6)


def document(rows: list[Any], **rest: Any) -> bytes:
    tree = {}
    for path, typestr, skip, shape in rows:
        value = {"value_type": typestr, "skip_deserialize": skip}
        if shape is not None:
            value["write_shape"] = shape

        keys = [{"key": key, "key_type": kind} for key, kind in path]
        tree[str(tuple(key for key, _ in path))] = {"key_metadata": keys, "value_metadata": value}

    return json.dumps({"tree_metadata": tree, "use_ocdbt": True, **rest}).encode()


def slowly(data: bytes) -> Any:
    found = parse_object("p", data)
    return metadata._decode_entries("p", as_object("p", "tree_metadata", found["tree_metadata"]))


@given(entries)
def test_metadata_is_read_alike(rows: list[Any]) -> None:
    data = document(rows, custom_metadata={"x": [1, None, "}}}, "]})
    quick = quick_metadata.scan(data)

    if quick is not None:
        assert quick[0] == slowly(data)
        assert {"tree_metadata": json.loads(data)["tree_metadata"], **quick[1]} == json.loads(data)


@pytest.mark.parametrize("n", [1, 2, 3000])
def test_the_usual_form_is_read_quickly_however_long(n: int) -> None:
    rows = [
        ([("opt", 2), (str(at), 1), ("mu", 2)], "jax.Array", at % 2 == 0, [at, 3] if at % 3 else None)
        for at in range(n)
    ]
    data = document([*rows, ([], "None", True, None)], use_zarr3=False)

    quick = quick_metadata.scan(data)

    assert quick is not None
    assert quick[0] == slowly(data)
    assert quick[1] == {"use_ocdbt": True, "use_zarr3": False}
    assert len(data) < slices.SLICE or n == 3000


ENTRY = (
    b'"(\'a\',)": {"key_metadata": [{"key": "a", "key_type": 2}], '
    b'"value_metadata": {"value_type": "np.ndarray", "skip_deserialize": false}}'
)
USUAL = b'{"tree_metadata": {' + ENTRY + b'}, "use_ocdbt": true}'


def test_the_example_is_of_the_usual_form() -> None:
    quick = quick_metadata.scan(USUAL)
    assert quick is not None
    assert quick[0].keys == [("a",)]


@pytest.mark.parametrize(
    "data",
    [
        USUAL.replace(b": 2", b": 3"),
        USUAL.replace(b": 2", b": 12"),
        USUAL.replace(b"false", b"null"),
        USUAL.replace(b'"a", "key', b'"a\\u0062", "key'),
        USUAL.replace(b'"key_type": 2', b'"key_type": 2, "more": 1'),
        USUAL.replace(b'"value_metadata": {', b'"value_metadata":  {'),
        USUAL.replace(b'}, "use', b', "tree_metadata": {}}, "use'),
        USUAL.replace(b'"use_ocdbt"', b'"tree_metadata": {}, "use_ocdbt"'),
        USUAL.replace(ENTRY, ENTRY + b", " + ENTRY),
        USUAL.replace(ENTRY, ENTRY + b"x, " + ENTRY),
        USUAL[:-1],
        USUAL + b"x",
        USUAL.replace(b"np.ndarray", b"np\xff"),
        b'{"tree_metadata": {}, "use_ocdbt": true}',
        b"",
        b"[]",
    ],
    ids=range(16),
)
def test_another_form_is_left_to_the_parser(data: bytes) -> None:
    assert quick_metadata.scan(data) is None


def test_every_cut_of_a_document_is_left_to_the_parser() -> None:
    for length in range(len(USUAL)):
        assert quick_metadata.scan(USUAL[:length]) is None


arrays = st.lists(
    st.tuples(
        texts,
        shapes.map(lambda shape: shape or (1,)),
        st.one_of(st.none(), st.sampled_from(["rbg", "threefry2x32"])),
    )
)


@given(arrays)
def test_random_keys_are_found_alike(rows: list[Any]) -> None:
    items = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": shape,
                "chunk_shape": shape,
                "ext_metadata": {"random_key_impl": impl} if impl else None,
            }
        }
        for name, shape, impl in rows
    ]
    data = json.dumps({"array_metadatas": items}).encode()

    assert array_metadatas.decode_random_keys("p", data) == array_metadatas._decode("p", data)


def test_a_long_document_of_arrays_is_read_quickly() -> None:
    items = [
        {
            "array_metadata": {
                "param_name": f"l{at}",
                "write_shape": [at],
                "chunk_shape": [],
                "ext_metadata": {"random_key_impl": "rbg"} if at % 7 == 0 else None,
            }
        }
        for at in range(3000)
    ]
    data = json.dumps({"array_metadatas": items}).encode()

    assert array_metadatas._scan(data) == {f"l{at}": "rbg" for at in range(0, 3000, 7)}
    assert array_metadatas._scan(data[:-3]) is None
    assert array_metadatas._scan(data.replace(b'"l4"', b'"l4", "x": 1')) is None


TEXT = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_long_documents_of_shardings_are_read_in_slices(separators: tuple[str, str]) -> None:
    wanted = {f"l{at}/ä~{'x' * (at % 5)}": TEXT for at in range(2000)}
    document = json.loads(sharding.encode(wanted.items()))
    data = json.dumps(document, separators=separators).encode()
    assert len(data) > 2 * slices.SLICE

    assert sharding.decode("p", data) == wanted
    for length in (len(data) - 1, len(data) - 2, len(data) // 2):
        with pytest.raises(CorruptCheckpointError, match="p: is not JSON"):
            sharding.decode("p", data[:length])

    wrong = json.dumps({**document, urlsafe_b64encode(b"l7").decode(): 3}, separators=separators).encode()
    with pytest.raises(CorruptCheckpointError, match="the sharding of 'l7'"):
        sharding.decode("p", wrong)


@given(st.lists(st.text("ab}", min_size=1), min_size=1, max_size=20))
def test_slices_join_to_the_whole(members: list[str]) -> None:
    text = "[" + ", ".join(f'{{"{member}"}}' for member in members) + "]"
    found = list(slices.slices(text, 1, len(text) - 1, '"}, {', 2))
    assert ", ".join(found) == text[1:-1]
