"""Orbax's own test files, with penstock's classes in the place of Orbax's. `make orbax-tests SOURCE=...`.

    python -m tests.proofs.orbax_tests SOURCE [--library orbax] [--results FOLDER] [--only PART]
    python -m tests.proofs.orbax_tests --table FOLDER [FOLDER ...]

`SOURCE` is a checkout of Orbax, whose tests are not in its wheel. Each file runs in a process of its own. Run
it with `--library orbax`, too: tests that the installed Orbax fails do not count. A table compares two or
more folders of results; the first is Orbax's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

_LEFT_OUT = ("emergency", "tiering_service", "benchmarks", "testing/oss", "gcs_")
_STARTS = 4


def _files(source: Path, only: str) -> list[Path]:
    found = sorted(path.relative_to(source) for path in source.rglob("*_test.py"))
    kept = (path for path in found if not any(part in str(path) for part in _LEFT_OUT))
    return [path for path in kept if only in str(path)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def results_of(path: Path) -> dict[str, tuple[str, str]]:
    """Return what came of each test: passed, failed, skipped or died, and why."""
    found: dict[str, tuple[str, str]] = {}
    for line in _lines(path):
        if line["test"]:
            found[line["test"]] = (line["status"].replace("begun", "died"), line.get("why", ""))
    return found


def _stem(file: Path) -> str:
    return str(file.with_suffix("")).replace("/", ".").removeprefix("orbax.checkpoint.")


def _uses(path: Path) -> set[str]:
    return {name for line in _lines(path) if line["status"] == "uses" for name in line["why"]}


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _run(options: argparse.Namespace, source: Path, file: Path) -> None:
    name = _stem(file)
    results = options.results / f"{name}.jsonl"
    command = [
        sys.executable,
        "-m",
        "tests.proofs.orbax_tests.one_file",
        str(source),
        str(file),
        str(results),
    ]
    command += [
        "--library",
        options.library,
        "--sample",
        str(options.sample),
        "--limit-s",
        str(options.limit_s),
    ]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TEST_TMPDIR": str(options.results.absolute() / "tmp"),
    }
    began = time.monotonic()
    for _ in range(_STARTS):
        if any(line["status"] in ("end", "import") for line in _lines(results)):
            break
        left = options.file_limit_s - (time.monotonic() - began)
        with (options.results / f"{name}.log").open("a") as log:
            try:
                subprocess.run(
                    command, stdout=log, stderr=log, env=environment, timeout=max(left, 1), check=False
                )
            except subprocess.TimeoutExpired:
                break

    counts = Counter(status for status, _ in results_of(results).values())
    _say(f"{time.monotonic() - began:6.1f} s  {name}  {dict(counts)}")


def _table(folders: list[Path]) -> None:
    """Print how many of the tests that Orbax passes each other folder passes, and which it does not."""
    totals: Counter[Path] = Counter()
    n_counted = 0
    _say("| file | Orbax | " + " | ".join(folder.name for folder in folders[1:]) + " |")
    _say("| --- |" + " --- |" * len(folders))
    for path in sorted(folders[0].glob("*.jsonl")):
        uses = _uses(folders[-1] / path.name)
        passed = {test for test, (status, _) in results_of(path).items() if status == "passed"}
        if not uses or not passed:
            continue
        cells: list[str] = []
        n_counted += len(passed)
        for folder in folders[1:]:
            here = {
                test for test, (status, _) in results_of(folder / path.name).items() if status == "passed"
            }
            totals[folder] += len(here & passed)
            cells.append(str(len(here & passed)))
        _say(f"| {path.stem} | {len(passed)} | " + " | ".join(cells) + " |")
    _say(f"| all | {n_counted} | " + " | ".join(str(totals[folder]) for folder in folders[1:]) + " |")


def main() -> None:
    """Run the files, or print a table of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--library", choices=("orbax", "penstock"), default="penstock")
    parser.add_argument("--results", type=Path, default=Path("build/orbax_tests"))
    parser.add_argument("--only", default="", help="files with this in their path")
    parser.add_argument(
        "--sample", type=int, default=0, help="so many of the parameters of one method; 0 is all"
    )
    parser.add_argument("--limit-s", type=int, default=30, help="seconds for one test")
    parser.add_argument("--file-limit-s", type=int, default=900, help="seconds for one file")
    parser.add_argument("--used-in", type=Path, help="only files that used penstock in these results")
    parser.add_argument("--table", type=Path, nargs="+", help="folders of results to compare")
    options = parser.parse_args()
    if options.table:
        _table(options.table)
        return

    source = options.source if (options.source / "orbax").exists() else options.source / "checkpoint"
    options.results.mkdir(parents=True, exist_ok=True)
    for file in _files(source, options.only):
        if options.used_in is None or _uses(options.used_in / f"{_stem(file)}.jsonl"):
            _run(options, source, file)


if __name__ == "__main__":
    main()
