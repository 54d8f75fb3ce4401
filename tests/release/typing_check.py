"""Checks the types of the installed package as its users see them: by mypy, by pyright, and all known."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.release.places import quietly, ten_lines, tools

__all__ = ("check_types",)

INSIDE = ("penstock.handlers.", "penstock.kernel.", "penstock.stages.")
"""Modules that are not public, but for what the packages themselves name."""

LEAST = 0.94  # of the types, how many are declared and not inferred

WRONG = "import penstock\npenstock.typo\n"


def check_types(inside: Path) -> None:
    """Check a program that uses the installed package, and the package's own completeness.

    Raises:
        SystemExit: If a checker finds an error in a right program, or none in a wrong one.
    """
    place = Path(tempfile.mkdtemp(prefix="penstock-types-"))
    try:
        (place / "right.py").write_text(ten_lines())
        (place / "wrong.py").write_text(WRONG)
        mypy = (tools(), "-m", "mypy", "--strict", "--python-executable", inside)
        pyright = (tools(), "-m", "pyright", "--pythonpath", inside)
        quietly(*mypy, "right.py", cwd=place)
        quietly(*pyright, "right.py", cwd=place)
        for checker in (mypy, pyright):
            _refuses(checker, place)
        verify = (*pyright, "--verifytypes", "penstock", "--ignoreexternal", "--outputjson")
        here = {"PATH": f"{inside.parent}:/usr/bin:/bin"}  # `--verifytypes` asks the first Python on it
        about = json.loads(quietly(*verify, cwd=place, env=here, fails=True))["typeCompleteness"]
    finally:
        shutil.rmtree(place)

    symbols = [each for each in about["symbols"] if each["isExported"]]
    unknown = [each["name"] for each in symbols if not each["isTypeKnown"] and not each["isTypeAmbiguous"]]
    if public := [name for name in unknown if not name.startswith(INSIDE)]:
        raise SystemExit(f"types that nobody knows: {', '.join(public)}")

    score = about["completenessScore"]
    if score < LEAST:
        raise SystemExit(f"only {score:.1%} of all types are declared")

    print(
        "  mypy and pyright accept the README's program; every public name has a type; "
        f"{score:.1%} of all types are declared"
    )


def _refuses(checker: tuple[str | Path, ...], place: Path) -> None:
    try:
        quietly(*checker, "wrong.py", cwd=place)
    except SystemExit as refused:
        if "typo" in str(refused):
            return
        raise
    raise SystemExit(f"{checker[2]} accepts penstock.typo")
