"""Documents are read in slices if they are of the usual form, as a whole if not, and to the same result."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptCheckpointError
from penstock.handlers.formats.orbax import tree_metadata as array_metadatas
from penstock.handlers.formats.orbax import tree_metadata as sharding_document
from penstock.handlers.formats.orbax.tree_metadata import (
    _decode_any,
    _decode_usual,
    decode_entries,
    decode_tree_metadata,
)
from penstock.handlers.formats.untrusted import SLICE_BYTES, UnusualFormError

texts = st.one_of(
    st.sampled_from(["a", "b", "opt", "", "0", "}}, ", "}}}, x", "]", "[", "': {", "a.b", "}, {", "ä", "'"]),
    st.sampled_from([', {"key": ', "\\"]),
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


@given(entries)
def test_metadata_is_read_alike_in_every_form(rows: list[Any]) -> None:
    data = document(rows, custom_metadata={"x": [1, None, "}}}, "]})
    other = json.dumps(json.loads(data), indent=1).encode()

    assert decode_entries("p", data) == _decode_any("p", data) == decode_entries("p", other)


@pytest.mark.parametrize("n", [1, 2, 3000])
def test_the_usual_form_is_read_in_slices_however_long(n: int) -> None:
    rows = [
        ([("öpt", 2), (str(at), 1), ("mu", 2)], "jax.Array", at % 2 == 0, [at, 3] if at % 3 else None)
        for at in range(n)
    ]
    data = document([*rows, ([], "None", True, None)], use_zarr3=False)

    assert _decode_usual("p", data) == _decode_any("p", data)
    assert len(data) < SLICE_BYTES or n == 3000


def test_siblings_share_the_keys_above_them_and_equal_leaves_their_type() -> None:
    rows = [([("opt", 2), (part, 2), (name, 2)], "jax.Array", False, [3]) for part in "ab" for name in "wv"]
    found, _ = _decode_usual("p", document(rows))

    assert found.keys == [("opt", part, name) for part in "ab" for name in "wv"]
    assert len({id(keys[1]) for keys in found.keys}) == len({id(keys[2]) for keys in found.keys}) == 2
    assert len({id(type_) for type_ in found.types}) == 1


siblings = st.lists(
    st.tuples(
        st.lists(st.tuples(texts, st.integers(1, 2)), max_size=2, unique_by=lambda step: step[0]),
        st.sampled_from(["w", "é", "", "it's", "a, "]),
        st.integers(1, 2),
        st.sampled_from([None, [3]]),
        st.integers(30, 70),
    ),
    max_size=3,
)


@given(siblings, entries)
def test_siblings_are_read_alike_in_every_form(containers: list[Any], others: list[Any]) -> None:
    rows = [
        ([*outer, (f"{key}{at:03d}", kind)], "jax.Array", False, shape)
        for outer, key, kind, shape, n in containers
        for at in range(n)
    ]
    data = document([*rows, *others])

    assert decode_entries("p", data) == _decode_any("p", data)


def _of_siblings(*names: str) -> bytes:
    return document([([("a", 2), (name, 2)], "jax.Array", False, [3]) for name in names])


_HUNDRED = [f"w{at:02d}" for at in range(100)]


@pytest.mark.parametrize("at", [1, 31, 32, 33, 98, 99])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\"('a', 'w%02d')\"", b"\"('a', 'x%02d')\""),  # a name, which only has to be another one
        (b'{"key": "w%02d"', b'{"key": "x%02d"'),
        (b'"w%02d", "key_type": 2', b'"w%02d", "key_type": 1'),
        (b'{"key": "w%02d", "key_type": 2}', b'{"key": "w%02d", "key_type": 2, "x": 1}'),
        (b'{"key": "w%02d", ', b'{"key":  "w%02d", '),
    ],
    ids=["name", "key", "kind", "member", "blank"],
)
def test_an_entry_among_siblings_that_differs_is_read_as_it_is(old: bytes, new: bytes, at: int) -> None:
    data = _of_siblings(*_HUNDRED)
    assert data.count(old % at) == 1
    changed = data.replace(old % at, new % at)

    assert decode_entries("p", changed) == _decode_any("p", changed)


@pytest.mark.parametrize("at", [1, 31, 32, 33, 98, 99])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"w%02d", b"w\x00%01d"),
        (b"w%02d", b'w"%01d'),
        (b"w%02d", b"w\\%01d"),
        (b"w%02d", b"w\xff%01d"),
        (b'"key": "w%02d", "key_type": 2', b'"key": "w%02d", "key_type": 3'),
    ],
    ids=["control", "quote", "escape", "no text", "kind"],
)
def test_damage_among_siblings_is_noticed(old: bytes, new: bytes, at: int) -> None:
    data = _of_siblings(*_HUNDRED)
    with pytest.raises(CorruptCheckpointError):
        decode_entries("p", data.replace(old % at, new % (at % 10 if new.count(b"01d") else at)))


@pytest.mark.parametrize(
    "names", [[*_HUNDRED, "w00"], [*_HUNDRED, "w50"], ["w50", "x", *_HUNDRED], [*_HUNDRED] * 2]
)
def test_a_name_among_siblings_that_occurs_twice_is_noticed(names: list[str]) -> None:
    parts = [_of_siblings(name).removeprefix(_START).removesuffix(_REST) for name in names]
    data = _START + b", ".join(parts) + _REST
    with pytest.raises(CorruptCheckpointError, match="occurs twice"):
        decode_entries("p", data)


def test_names_of_siblings_that_are_no_key_paths_are_noticed_where_one_occurs_twice() -> None:
    siblings = _of_siblings(*_HUNDRED).replace(b"\"('a', 'w", b'"zw')
    twice = ENTRY.replace(b"\"('a',)\"", b'"zw05\')"')
    data = siblings.replace(_REST, b", " + twice + _REST)
    assert data.count(b'"zw05\')"') == 2

    with pytest.raises(CorruptCheckpointError, match="occurs twice"):
        decode_entries("p", data)


_START, _REST = b'{"tree_metadata": {', b'}, "use_ocdbt": true}'


def test_numbers_that_only_python_writes_are_read() -> None:
    data = document([([("a", 2)], "scalar", False, None)], custom_metadata={"loss": float("nan")})
    assert b"NaN" in data
    assert decode_tree_metadata("p", data).keys == [("a",)]
    assert str(decode_tree_metadata("p", data).custom_metadata) == "{'loss': nan}"


ENTRY = (
    b'"(\'a\',)": {"key_metadata": [{"key": "a", "key_type": 2}], '
    b'"value_metadata": {"value_type": "np.ndarray", "skip_deserialize": false}}'
)
USUAL = b'{"tree_metadata": {' + ENTRY + b'}, "use_ocdbt": true}'


def test_the_example_is_of_the_usual_form() -> None:
    assert _decode_usual("p", USUAL)[0].keys == [("a",)]


@pytest.mark.parametrize(
    "data",
    [
        USUAL.replace(b'"key_type": 2', b'"key_type": 2, "more": 1'),
        USUAL.replace(b'"value_metadata": {', b'"value_metadata":  {'),
        USUAL.replace(b'"a", "key', b'"\\u0061", "key'),
        USUAL.replace(b'"key_type": 2', b'"key_type": 2, "more": [{"at": 1}, {"key": "b", "key_type": 1}]'),
        USUAL.replace(b", ", b",\n"),
        USUAL.replace(b'"skip_deserialize": false', b'"write_shape": null, "skip_deserialize": false'),
        USUAL.replace(b', "skip_deserialize": false', b""),
    ],
    ids=range(7),
)
def test_a_sound_document_of_another_form_is_read(data: bytes) -> None:
    assert decode_entries("p", data) == decode_entries("p", USUAL)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            USUAL.replace(b": 2", b": 3"),
            r"\('a',\): Invalid enum value 3 - at .*key_metadata\[0\].key_type",
        ),
        (USUAL.replace(b": 2", b": true"), "key_type"),
        (USUAL.replace(b": 2}", b': 2}, {"key": "b", "key_type": 3}'), r"key_metadata\[1\].key_type"),
        (USUAL.replace(b": 2}", b': 3}, {"key": "b", "key_type": 2}'), r"key_metadata\[0\].key_type"),
        (USUAL.replace(b"false", b"null"), "skip_deserialize"),
        (USUAL.replace(b'"np.ndarray"', b"7"), "value_type"),
        (USUAL.replace(b"false", b'false, "write_shape": [-1]'), "write_shape"),
        (USUAL.replace(b"false", b'false, "write_shape": [1.5]'), "write_shape"),
        (USUAL.replace(b'"key": "a", ', b""), "missing required field `key`"),
        (USUAL.replace(b'}, "use', b', "tree_metadata": {}}, "use'), "is"),
        (USUAL.replace(b'"use_ocdbt"', b'"tree_metadata": {}, "use_ocdbt"'), "'tree_metadata' occurs twice"),
        (USUAL.replace(ENTRY, ENTRY + b", " + ENTRY), "occurs twice"),
        (USUAL.replace(ENTRY, ENTRY + b"," + ENTRY), "occurs twice"),
        (USUAL.replace(ENTRY, ENTRY + b"x, " + ENTRY), "is not JSON"),
        (USUAL[:-1], "is not JSON"),
        (USUAL + b"x", "is not JSON"),
        (USUAL.replace(b"np.ndarray", b"np\xff"), "is not JSON"),
        (USUAL.replace(ENTRY, b'"a": 3'), "a: Expected `object`, got `int`"),
        (b'{"use_ocdbt": true}', "tree_metadata is missing, not an object"),
        (b"", "is empty"),
        (b"[]", "not an object"),
        (b'{"tree_metadata": {"a": ' + b"[" * 100_000, "is not JSON"),
    ],
    ids=range(22),
)
def test_damage_is_named(data: bytes, said: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"^p: .*{said}"):
        decode_entries("p", data)


def test_a_name_in_another_slice_that_occurs_twice_is_noticed() -> None:
    rows = [([(str(at), 2)], "jax.Array", False, None) for at in range(3000)]
    data = document(rows)
    twice = data.replace(b"\"('2999',)\"", b"\"('0',)\"")
    assert twice != data

    with pytest.raises(CorruptCheckpointError, match="occurs twice"):
        decode_entries("p", twice)


def test_every_cut_of_a_document_is_noticed() -> None:
    for length in range(len(USUAL)):
        with pytest.raises(CorruptCheckpointError):
            decode_entries("p", USUAL[:length])


arrays = st.lists(
    st.tuples(
        texts,
        shapes.map(lambda shape: shape or (1,)),
        st.one_of(st.none(), st.sampled_from(["rbg", "threefry2x32"])),
    )
)


def items_of(rows: list[Any]) -> dict[str, Any]:
    return {
        "array_metadatas": [
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
    }


@given(arrays)
def test_random_keys_are_found_in_every_form(rows: list[Any]) -> None:
    wanted = {name: impl for name, _, impl in rows if impl}
    for form in (None, 1):
        data = json.dumps(items_of(rows), indent=form).encode()
        found = array_metadatas.decode_random_keys("p", data)
        assert {name: found.get(name) for name in wanted} == wanted


def test_a_long_document_of_arrays_is_read_in_slices() -> None:
    data = json.dumps(
        items_of([(f"l{at}", [at], "rbg" if at % 7 == 0 else None) for at in range(3000)])
    ).encode()

    assert array_metadatas._decode_usual_arrays(data) == {f"l{at}": "rbg" for at in range(0, 3000, 7)}
    with pytest.raises(UnusualFormError):
        array_metadatas._decode_usual_arrays(data[:-3])
    with pytest.raises(CorruptCheckpointError, match="p: is not JSON"):
        array_metadatas.decode_random_keys("p", data[:-3])
    with pytest.raises(CorruptCheckpointError, match=r"p: item 4: .*param_name"):
        array_metadatas.decode_random_keys("p", data.replace(b'"l4"', b"4"))


TEXT = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_long_documents_of_shardings_are_read_in_slices(separators: tuple[str, str]) -> None:
    wanted = {f"l{at}/ä~{'x' * (at % 5)}": TEXT for at in range(2000)}
    members = json.loads(b"".join(sharding_document.encode_shardings(list(wanted), list(wanted.values()))))
    data = json.dumps(members, separators=separators).encode()
    assert len(data) > 2 * SLICE_BYTES

    assert sharding_document.decode_shardings("p", data) == wanted
    for length in (len(data) - 1, len(data) - 2, len(data) // 2):
        with pytest.raises(CorruptCheckpointError, match="p: is not JSON"):
            sharding_document.decode_shardings("p", data[:length])

    wrong = json.dumps({**members, urlsafe_b64encode(b"l7").decode(): 3}, separators=separators).encode()
    with pytest.raises(CorruptCheckpointError, match="the sharding of 'bDc=' is 3"):
        sharding_document.decode_shardings("p", wrong)

    twice = data.replace(urlsafe_b64encode("l1999/ä~xxxx".encode()), urlsafe_b64encode("l0/ä~".encode()))
    with pytest.raises(CorruptCheckpointError, match="occurs twice"):
        sharding_document.decode_shardings("p", twice)
