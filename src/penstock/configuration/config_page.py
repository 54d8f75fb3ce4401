"""The reference of the configuration as a page: docs/reference/configuration.md."""

from __future__ import annotations

__all__ = ("config_page",)

from collections.abc import Iterator
from itertools import groupby

from penstock.configuration.option_reference import OptionEntry, every_option

_HEAD = """# Configuration

Every key of `penstock.toml`, with its type, unit, default and effect. A test keeps this page as
`penstock config reference --markdown` prints it. [Configure it](../howto/configure.md) says where the file is
looked for, and how profiles and the environment go over it.

A key of bytes takes a number, or a text such as `"64MiB"`; one of seconds a number, or a text such as
`"500ms"`. In the environment `save.write.concurrency` is `PENSTOCK_SAVE__WRITE__CONCURRENCY`. Editors
complete and check the file by [penstock.schema.json](penstock.schema.json): a first line
`#:schema PATH` names it.
"""


def config_page() -> str:
    """Return the page as Markdown."""
    return _HEAD + "".join(_sections())


def _sections() -> Iterator[str]:
    for section, entries in groupby(every_option(), lambda entry: entry.section):
        yield f"\n## `[{section}]`\n\n| key | type | default | effect |\n| --- | --- | --- | --- |\n"
        yield from map(_row, entries)


def _row(entry: OptionEntry) -> str:
    kind = f"{entry.type}, {entry.unit}" if entry.unit else entry.type
    cells = (f"`{entry.name}`", kind, entry.default, entry.effect)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
