"""Which text the demo learns: penstock's own."""

from __future__ import annotations

__all__ = ("own_text", "read_text")

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from penstock.cli.terminal.terminal_output import CommandError

LEAST = 1000  # characters
ENOUGH = 50_000  # characters; with fewer of prose, the source follows it


def read_text(path: Path | None) -> tuple[str, str]:
    """Return a text, and in a few words what it is: the one at `path`, or penstock's own.

    Raises:
        CommandError: If it cannot be read, or is too short to learn from.
    """
    if path is None:
        return own_text()

    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error

    if len(text) < LEAST:
        raise CommandError(f"{path} is too short: {len(text)} characters, of {LEAST} needed")

    return text, str(path)


def own_text() -> tuple[str, str]:
    """Return a text, and in a few words what it is.

    In a checkout it is the documentation, followed by the source as long as the former is short; of
    an installed wheel, which has no documentation, the source.
    """
    package = files("penstock")
    prose = "\n".join(_read(path) for path in _documents(Path(str(package)).parents[1]))
    if len(prose) >= ENOUGH:
        return prose, "penstock's documentation"

    source = "\n".join(path.read_text("utf-8") for path in _modules(package))
    return f"{prose}\n{source}", "penstock's documentation and source" if prose else "penstock's source"


def _documents(root: Path) -> list[Path]:
    if not (root / "pyproject.toml").is_file() or not (root / "kernel").is_dir():
        return []  # not a checkout: whatever lies here is somebody else's

    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def _modules(folder: Traversable) -> Iterator[Traversable]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _modules(entry)
        elif entry.name.endswith(".py"):
            yield entry


def _read(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")
