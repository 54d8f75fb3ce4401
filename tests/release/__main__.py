"""`make release-check`: everything that is looked at before a release. `--help` lists the parts.

Runs with any Python 3.11 or later and needs nothing but git; all else is installed below build/release.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.release.addresses import check_addresses
from tests.release.bill import bill
from tests.release.building import DIST, build, wheel_of
from tests.release.installing import WHICH, install
from tests.release.places import WORK
from tests.release.typing_check import check_types

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
PARTS = ("build", "install", "types", "bill")
BY_NAME = "addresses"
"""The part that needs the network, and the repository to be public: done only where it is named."""


def main() -> None:
    """Run the parts that were asked for, all by default."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}, all by default; or {BY_NAME}")
    parser.add_argument("--python", action="append", choices=VERSIONS, help="install on this one only")
    parser.add_argument("--dependencies", choices=WHICH, help="install with these only")
    options = parser.parse_args()
    parts = options.parts or PARTS
    if not set(parts) <= {*PARTS, BY_NAME}:
        parser.error(f"parts are {', '.join([*PARTS, BY_NAME])}")

    if "build" in parts:
        print("build:")
        build()
    if {"install", "types", "bill"} & set(parts):
        check(parts, options)
    if BY_NAME in parts:
        print("addresses:")
        check_addresses()


def check(parts: Sequence[str], options: argparse.Namespace) -> None:
    """Look at the wheel that was built."""
    versions = options.python or VERSIONS
    which = [options.dependencies] if options.dependencies else WHICH
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheel = wheel_of(DIST)
    if "install" in parts:
        print("install:")
        tried = [install(wheel, version, each) for version in versions for each in which]
        if not any(tried):
            raise SystemExit("none of the Pythons asked for is here")
    inside = WORK / f"{here}-newest" / "bin" / "python"
    if {"types", "bill"} & set(parts) and not inside.exists():
        install(wheel, here, "newest")
    if "types" in parts:
        print("types:")
        check_types(inside)
    if "bill" in parts:
        print("bill of materials:")
        bill(inside)


if __name__ == "__main__":
    main()
