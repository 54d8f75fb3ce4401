"""Options as cases: what each does, by the same few lines on both libraries.

A case says which parameters it shows, as `Class.parameter` by the name under `penstock.orbax`. A test runs it
on both libraries and compares what it returns; `test_every_parameter` knows from it what is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

Case = Callable[[Any, Path], Any]
"""Takes a library, and a folder of its own; returns what is compared."""


@dataclass(frozen=True)
class Shown:
    """A case, and what it shows."""

    parameters: tuple[str, ...]
    case: Case


class Cases(list[Shown]):
    """Cases of one file, in the order of their definition."""

    def shows(self, *parameters: str) -> Callable[[Case], Case]:
        """Add the decorated function as a case."""

        def add(case: Case) -> Case:
            self.append(Shown(parameters, case))
            return case

        return add

    def parameters(self) -> set[str]:
        """All that is shown."""
        return {parameter for shown in self for parameter in shown.parameters}


def refused(function: Callable[..., Any], *args: Any, **keywords: Any) -> str:
    """Return which of Python's errors a call raises, or that it raises none."""
    try:
        function(*args, **keywords)
    except Exception as error:
        kinds = (
            FileNotFoundError,
            FileExistsError,
            ValueError,
            TypeError,
            KeyError,
            NotImplementedError,
            OSError,
        )
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), type(error).__name__)

    return "nothing"


def values(tree: Any) -> Any:
    """A tree as plain values, with the type of each leaf."""

    def plain(leaf: Any) -> Any:
        kind = "jax" if isinstance(leaf, jax.Array) else type(leaf).__name__
        return (kind, str(leaf.dtype), leaf.tolist()) if hasattr(leaf, "tolist") else (kind, leaf)

    return jax.tree.map(plain, tree)
