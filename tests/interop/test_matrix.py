"""Every cell of the tables in docs/reference/interoperability.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.interop.matrix.model import Asked, Reader
from tests.interop.matrix.page import PAGE, render
from tests.interop.matrix.sections import SECTIONS

pytestmark = [
    # Orbax warns whenever it takes shardings from the file, which is what is tried here.
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning:orbax"),
]
WRITTEN = [
    pytest.param((section, writer, variant), id=f"{writer.label}: {variant}")
    for section in SECTIONS
    for writer in section.writers
    for variant in writer.variants
]


def test_the_page_shows_the_matrix() -> None:
    page = PAGE.read_text()
    assert render(page) == page, "stale: run `make interop`"


@pytest.mark.thinned(3)
@pytest.mark.parametrize("what", WRITTEN)
def test_every_reader_of_the_matrix_reads_what_it_should(
    what: Any,
    tmp_path: Path,
    compare: Callable[[Any, Any], None],
    to_plain: Callable[[Any], Any],
    subtests: pytest.Subtests,
) -> None:
    section, writer, variant = what
    tree = section.tree()
    writer.variants[variant](tmp_path, tree)
    like = writer.expected(tree, variant)

    for reader in section.readers:
        with subtests.test(reader.label):
            check(reader, Asked(tmp_path, like), writer.cannot.get(reader.label), compare, to_plain)


def check(
    reader: Reader,
    asked: Asked,
    why_not: str | None,
    compare: Callable[[Any, Any], None],
    to_plain: Callable[[Any], Any],
) -> None:
    if reader.label == "zarr-python":
        pytest.importorskip("zarr")
    if why_not is None:
        compare(reader.read(asked), asked.like if reader.has_target else to_plain(asked.like))
        return

    with pytest.raises(Exception):  # noqa: B017, PT011  # what theirs raise is theirs
        compare(reader.read(asked), asked.like)
