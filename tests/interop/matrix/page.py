"""The tables of docs/reference/interoperability.md: `python -m tests.interop.matrix.page` makes them anew."""

from __future__ import annotations

__all__ = ("PAGE", "render")

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.interop.matrix.model import Reader, Section, Writer
from tests.interop.matrix.sections import SECTIONS

PAGE: Final = Path(__file__).parents[3] / "docs/reference/interoperability.md"
_BEGIN: Final = "<!-- tables: made by `make interop` of tests/interop/matrix; do not edit -->\n"
_END: Final = "<!-- end of tables -->\n"


def render(page: str) -> str:
    """Return the page with all tables as the matrix has them now."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tables = "\n".join("\n".join(_table(section)) for section in SECTIONS)
    return f"{before}{_BEGIN}\n{tables}\n{_END}{after}"


def _table(section: Section) -> Iterator[str]:
    notes = {why: number for number, why in enumerate(_reasons(section), 1)}

    def cell(writer: Writer, reader: Reader) -> str:
        return f"no ({notes[writer.cannot[reader.label]]})" if reader.label in writer.cannot else "yes"

    yield f"## {section.title}"
    yield ""
    yield section.text
    yield ""
    if len(section.readers) > len(section.writers):  # long tables are read more easily than wide ones
        yield from _rows(
            [writer.label for writer in section.writers],
            {r.label: [cell(writer, r) for writer in section.writers] for r in section.readers},
        )
    else:
        yield from _rows(
            [reader.label for reader in section.readers],
            {w.label: [cell(w, reader) for reader in section.readers] for w in section.writers},
        )
    yield ""
    for why, number in notes.items():
        yield f"({number}) {why}  "
    if notes:
        yield ""
    tried = {writer.label: writer.options or _names(writer) for writer in section.writers}
    for label, options in tried.items():
        if options:
            yield f"* {label}: {options}"
    if any(tried.values()):
        yield ""


def _names(writer: Writer) -> str:
    return ", ".join(f"`{name}`" for name in writer.variants if name)


def _rows(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield f"| | {' | '.join(columns)} |"
    yield f"| --- |{' --- |' * len(columns)}"
    for label, cells in rows.items():
        yield f"| {label} | {' | '.join(cells)} |"


def _reasons(section: Section) -> dict[str, None]:
    return dict.fromkeys(why for writer in section.writers for why in writer.cannot.values())


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
