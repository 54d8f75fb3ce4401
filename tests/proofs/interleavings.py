"""Explores every interleaving of three processes that save, with a crash and a pause. `make interleavings`.

The explorer raises if a promise is broken, with the steps that lead there. The transitions that were seen in
all scenarios are the table of docs/reference/coordination.md: it is compared, or written anew (`--write`).
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.handlers.coordinators.interleavings import HEAD, LONG, PAGE, SHORT, Row, explored, lines_of, table


def main() -> int:
    """Explore the scenarios one after another; return 1 if the table is not what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--only", default="", help="part of a scenario's name")
    options = parser.parse_args()
    rows, n_states = set[Row](), 0
    for name, scenario in {**SHORT, **LONG}.items():
        if options.only not in name:
            continue

        begun = time.monotonic()
        found = explored(scenario)
        rows |= found.rows
        n_states += found.n_states
        sys.stdout.write(f"{found.n_states:8,} states in {time.monotonic() - begun:5.0f} s: {name}\n")
        sys.stdout.flush()

    lines, known = list(lines_of(rows)), table()
    sys.stdout.write(f"{n_states:8,} states, {len(lines)} transitions; no promise is broken\n")
    new = [line for line in lines if line not in known]
    gone = [] if options.only else [line for line in known if line not in lines]
    sys.stdout.writelines(f"not in the table: {line}\n" for line in new)
    sys.stdout.writelines(f"not seen any more: {line}\n" for line in gone)
    if options.write and not options.only:
        before = PAGE.read_text().partition(HEAD)[0]
        PAGE.write_text(before + HEAD + "".join(f"{line}\n" for line in lines))
        return 0

    return 1 if new or gone else 0


if __name__ == "__main__":
    sys.exit(main())
