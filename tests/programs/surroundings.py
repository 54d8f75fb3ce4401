"""What the driven part of a program needs: packages without their beginnings, and TensorFlow's files."""

from __future__ import annotations

__all__ = ("bare_package", "local_gfile")

import glob
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from tests.programs.program import stand_in


def bare_package(*names: str) -> None:
    """Let modules of packages be imported without what their `__init__` imports.

    Args:
        names: Of the packages, parents first. They are found on `sys.path`.
    """
    for name in names:
        if name in sys.modules:
            continue

        parent, _, child = name.rpartition(".")
        places = sys.modules[parent].__path__ if parent else sys.path
        package = ModuleType(name)
        package.__path__ = [found for one in places if os.path.isdir(found := os.path.join(one, child))]
        sys.modules[name] = package
        if parent:
            setattr(sys.modules[parent], child, package)


def local_gfile() -> None:
    """Put TensorFlow's file operations where there is no TensorFlow, on local files."""
    stand_in("tensorflow", "tensorflow.io", "tensorflow.data", "tensorflow.train")
    errors = ModuleType("tensorflow.errors")
    errors.OpError = errors.NotFoundError = OSError  # type: ignore[attr-defined]  # there are no others
    sys.modules["tensorflow.errors"] = errors
    sys.modules["tensorflow"].errors = errors  # type: ignore[attr-defined]
    gfile = ModuleType("tensorflow.io.gfile")
    for name, function in {
        "exists": os.path.exists,
        "isdir": os.path.isdir,
        "listdir": os.listdir,
        "makedirs": lambda path: os.makedirs(path, exist_ok=True),
        "glob": glob.glob,
        "rename": os.rename,
        "rmtree": shutil.rmtree,
        "remove": os.remove,
        "GFile": open,
        "copy": lambda one, other, overwrite=False: shutil.copy(one, other),
        "join": lambda *parts: str(Path(*parts)),
    }.items():
        setattr(gfile, name, function)

    sys.modules["tensorflow.io.gfile"] = gfile
    sys.modules["tensorflow.io"].gfile = gfile  # type: ignore[attr-defined]  # a stand-in
