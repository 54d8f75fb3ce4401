"""A plugin of pytest: what is there before the tests of a program are, and which library they run with."""

from __future__ import annotations

__all__ = ("settings",)

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

_SETTINGS: Final = "OWN_TESTS"


def settings(driver: str, library: str, paths: Sequence[str]) -> Mapping[str, str]:
    """Return what the plugin reads from the environment.

    Args:
        driver: The module that drives the program, which is imported first, for what it stands in for.
        library: `orbax` or `penstock`.
        paths: To import from.
    """
    return {_SETTINGS: json.dumps([driver, library, *paths])}


def pytest_configure() -> None:
    """Make room for a package `tests`, which many a program has, too."""
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]

    root = os.environ["PYTHONPATH"].rpartition(os.pathsep)[2]
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd(), root)]


def _prepare(driver: str, library: str, *paths: str) -> None:
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # tests that are written for absl read flags, and pytest parses none
    sys.path[:0] = paths
    if library == "penstock":
        import penstock.orbax

        penstock.orbax.install()

    import_module(driver)


if _SETTINGS in os.environ:
    _prepare(*json.loads(os.environ[_SETTINGS]))
