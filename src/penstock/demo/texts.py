"""The text that the demo learns: penstock's own."""

from __future__ import annotations

__all__ = ("own_text", "read_text")

from pathlib import Path

import penstock
from penstock.cli.terminal import CommandError

LEAST = 1000  # characters


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
    """Return the source of penstock's kernel, and what it is in a few words."""
    kernel = Path(penstock.__file__).parent / "kernel"
    text = "\n".join(path.read_text("utf-8") for path in sorted(kernel.rglob("*.py")))
    return text, "the source of penstock's kernel"
