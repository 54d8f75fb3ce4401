"""Long documents are decoded in slices, and whatever is decoded is what the document says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import Decoder

from penstock.handlers.formats.untrusted import SLICE_BYTES, Slices, UnusualFormError, decode_object

ANY: Decoder[dict[str, Any]] = Decoder(dict[str, Any])
LISTS: Decoder[list[Any]] = Decoder(list[Any])
COMPACT, SPACED = (",", ":"), (", ", ": ")

# Long enough that the next boundary ends a slice, and full of what looks like one.
padding = st.sampled_from(["", "x" * SLICE_BYTES, '}},"' * (SLICE_BYTES // 4), '"}}, ' * (SLICE_BYTES // 2)])
texts = st.one_of(st.sampled_from(["}}, ", "}},", '}}, "', "{", "\\", '"', "}}"]), st.text(max_size=5))
values = st.recursive(texts, lambda inner: st.dictionaries(texts, inner, max_size=2), max_leaves=4)
members = st.dictionaries(texts, st.tuples(padding, values), max_size=6)


@given(members, st.sampled_from([COMPACT, SPACED]))
def test_what_is_decoded_is_what_the_document_says(found: dict[str, Any], form: tuple[str, str]) -> None:
    document = {name: {"a": {"pad": pad, "v": value}} for name, (pad, value) in found.items()}
    data = json.dumps(document, separators=form).encode()

    try:
        decoded = decode_object(ANY, data, b'}},"')
    except UnusualFormError:
        return

    assert decoded == document


@pytest.mark.parametrize("form", [COMPACT, SPACED])
@pytest.mark.parametrize("n", [0, 1, 2, 5000])
def test_the_usual_form_is_cut(n: int, form: tuple[str, str]) -> None:
    document = {f"name {at}": {"a": {"b": at}} for at in range(n)}
    data = json.dumps(document, separators=form).encode()

    parts = [part for _, part in Slices(ANY, data, 1, len(data) - 1, b'}},"')]

    assert decode_object(ANY, data, b'}},"') == document
    assert len(parts) == {0: 0, 1: 1, 2: 1}.get(n, len(parts))
    assert n < 5000 or len(parts) > 1
    assert all(len(part) < SLICE_BYTES + 50 for part in parts)


def test_an_array_is_cut() -> None:
    entries = [{"a": {"b": at}} for at in range(10_000)]
    data = json.dumps(entries).encode()

    parts = list(Slices(LISTS, data, 1, len(data) - 1, b"}},{", b"[]"))

    assert [entry for found, _ in parts for entry in found] == entries
    assert len(parts) > 1


@pytest.mark.parametrize("form", [COMPACT, SPACED])
@pytest.mark.parametrize("other", [1, 2999])
def test_a_name_that_occurs_twice_shows(other: int, form: tuple[str, str]) -> None:
    rows = [f'"name {at}"{form[1]}{{"a"{form[1]}{{"b"{form[1]}"{"x" * 50}"}}}}' for at in range(3000)]
    rows[other] = rows[0]
    data = f"{{{form[0].join(rows)}}}".encode()

    with pytest.raises(UnusualFormError):
        decode_object(ANY, data, b'}},"')


@pytest.mark.parametrize("data", [b"", b"{", b"}", b"[]", b'[{"a": 1}]', b' {"a": 1}', b'{"a": 1} '])
def test_what_is_no_object_is_of_another_form(data: bytes) -> None:
    with pytest.raises(UnusualFormError):
        decode_object(ANY, data, b'}},"')


def test_every_cut_of_a_document_is_noticed() -> None:
    data = json.dumps({f"name {at}": {"a": {"b": at}} for at in range(5000)}).encode()
    for length in [*range(100), *range(len(data) - 100, len(data)), SLICE_BYTES, 2 * SLICE_BYTES]:
        with pytest.raises(UnusualFormError):
            decode_object(ANY, data[:length], b'}},"')
