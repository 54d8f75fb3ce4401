"""Orbax's own test files, with penstock's classes in the place of Orbax's. `make orbax-tests SOURCE=...`.

    python -m tests.proofs.orbax_tests SOURCE [--library orbax] [--results FOLDER] [--only PART]
    python -m tests.proofs.orbax_tests --page PAGE --results FOLDER --against FOLDER

`SOURCE` is a checkout of Orbax, whose tests are not in its wheel. Each file runs in a process of its own. Run
it with `--library orbax`, too, for what failed: tests that the installed Orbax fails do not count. A page is
made of both results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.proofs.orbax_tests.reasons import SAYS_NOTHING, WORDS, reason_of

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


def alone(path: Path) -> set[str]:
    """Return the tests that passed and entered no function of penstock: what ran is Orbax's own code.

    One of penstock's data classes is in them. Results from before this was noted have none.
    """
    return {line["test"] for line in _lines(path) if line["status"] == "passed" and line.get("entered") == 0}


def _stem(file: Path) -> str:
    return str(file.with_suffix("")).replace("/", ".").removeprefix("orbax.checkpoint.")


def _not_imported(path: Path) -> str:
    """Return why a file could not be imported here; nothing if it could."""
    return next((line["why"] for line in _lines(path) if line["status"] == "import"), "")


def _uses(path: Path) -> set[str]:
    return {name for line in _lines(path) if line["status"] == "uses" for name in line["why"]}


def _failed(path: Path) -> set[str]:
    return {test for test, (status, _) in results_of(path).items() if status not in ("passed", "skipped")}


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
    if options.types_alone:
        command.append("--types-alone")
    if options.failed_in is not None:
        command += ["--failed-in", str((options.failed_in / f"{name}.jsonl").absolute())]
    scratch = options.results.absolute() / "tmp" / name
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TEST_TMPDIR": str(scratch),
    }
    shutil.rmtree(scratch, ignore_errors=True)  # a test that is run again finds nothing of the first time
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
    failed = _not_imported(results)
    _say(f"{time.monotonic() - began:6.1f} s  {name}  {failed or dict(counts)}")


def _counted(orbax: Path, penstock: Path) -> dict[str, tuple[str, str]]:
    """Return what came of the tests on penstock that pass with one of the libraries."""
    theirs, ours = results_of(orbax), results_of(penstock)
    known = {test: found for test, found in ours.items() if found[0] != "skipped"}
    return {
        test: found
        for test, found in known.items()
        if found[0] == "passed" or theirs.get(test, ("passed",))[0] == "passed"
    }


def page(orbax: Path, penstock: Path) -> str:
    """Return the page of the documentation: a row for each file, and what fails.

    Args:
        orbax: The folder of results with Orbax, of the tests at least that fail on penstock.
        penstock: That of results with penstock.
    """
    totals: Counter[str] = Counter()
    rows, failed, left_out = list[str](), list[str](), Counter[str]()
    for path in sorted(penstock.glob("*.jsonl")):
        counted = _counted(orbax / path.name, path) if _uses(path) else {}
        theirs = alone(path) & counted.keys()
        if _uses(path):
            ran = [status for status, _ in results_of(path).values()]
            skipped = ran.count("skipped")
            both = len(ran) - skipped - len(counted)
            totals.update(ran=len(ran), skipped=skipped, failed_in_both=both, alone=len(theirs))
        counted = {test: found for test, found in counted.items() if test not in theirs}
        reasons = {
            test: reason_of(path.stem, test, why)
            for test, (status, why) in counted.items()
            if status != "passed"
        }
        mine = [test for test, reason in reasons.items() if reason is None]
        n_passed = len(counted) - len(reasons)
        if counted or theirs:
            cells = n_passed, len(mine), len(reasons) - len(mine)
            totals.update(dict(zip(("passed", "failed", "out"), cells, strict=True)))
            shown = " | ".join(map(str, (*cells, len(theirs))))
            rows.append(f"| {path.stem.replace('_src.', '')} | {shown} |")
        left_out.update(reason for reason in reasons.values() if reason is not None)
        failed += [f"| `{test}` | {' '.join(counted[test][1].split())[:160]} |" for test in sorted(mine)]

    in_scope = totals["passed"] + totals["failed"]
    share = 100 * totals["passed"] / max(in_scope, 1)
    return "\n".join(
        (
            *_HEAD,
            f"{totals['passed']} of {in_scope} tests in scope pass ({share:.1f} %); {totals['out']} are not.",
            *_absent(penstock),
            *("", "## What the numbers mean", "", *_meaning(totals, left_out)),
            *(
                "",
                "## File by file",
                "",
                "| file | pass | fail | out of scope | Orbax's code alone |",
                "| --- | --- | --- | --- | --- |",
                *rows,
            ),
            *("", "## What fails", "", "| test | why |", "| --- | --- |", *failed),
            *("", "## What is out of scope, and why", "", "| tests | reason |", "| --- | --- |"),
            *(f"| {n} | {reason} |" for reason, n in left_out.most_common()),
            "",
        )
    )


def _absent(penstock: Path) -> list[str]:
    """Name the files that could not be imported, so that no test is missing in silence."""
    why = {path.stem.replace("_src.", ""): _not_imported(path) for path in sorted(penstock.glob("*.jsonl"))}
    rows = [f"* `{file}`: {said}" for file, said in why.items() if said]
    return ["", "Not imported, for want of a package:", "", *rows] if rows else []


def _meaning(totals: Counter[str], left_out: Counter[str]) -> list[str]:
    """Return a list that says of each number what it counts."""
    counted = totals["passed"] + totals["failed"] + totals["out"]
    words, nothing = left_out[WORDS], sum(left_out[reason] for reason in SAYS_NOTHING)
    as_asked = totals["passed"] + words
    share, share_asked = (100 * n / max(counted, 1) for n in (totals["passed"], as_asked))
    differ = totals["out"] - words - nothing
    return f"""\
* {totals["ran"]} tests reach something of penstock. {totals["skipped"]} skip themselves here, and
  {totals["failed_in_both"]} fail with the installed Orbax, too.
* {totals["alone"]} more pass and enter no function of penstock: one of its data classes is in them, and what
  runs is Orbax's own code. They do not count. The other {counted} do.
* {totals["passed"]} of these pass as they are: {share:.1f} %.
* {words} differ in the words of an error alone. They use `assertRaisesRegex`, which compares the text only
  if the error is of the type that the test expects. With them {as_asked} do what is asked:
  {share_asked:.1f} %.
* {nothing} show nothing of penstock: a private part of Orbax takes part in them, or a service that is not
  here.
* {differ} meet a difference that is meant, and that [the differences](orbax-differences.md) name.
* {totals["failed"]} fail for another reason. The share in scope says that each failure has a reason, and not
  that penstock is Orbax.""".splitlines()


_HEAD = (
    "# Orbax's own tests on penstock.orbax",
    "",
    "`make orbax-tests SOURCE=...` wrote this page.",
    "[How they are run, and what counts](../design/orbax.md#orbaxs-own-tests-run-on-penstockorbax).",
    "",
)


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
    parser.add_argument("--failed-in", type=Path, help="only tests that did not pass in these results")
    parser.add_argument("--types-alone", action="store_true", help="do not compare the words of errors")
    parser.add_argument("--page", type=Path, help="write the page of these results, and run nothing")
    parser.add_argument("--against", type=Path, help="the folder of results with Orbax, for the page")
    options = parser.parse_args()
    if options.page:
        options.page.write_text(page(options.against, options.results))
        return

    source = options.source if (options.source / "orbax").exists() else options.source / "checkpoint"
    options.results.mkdir(parents=True, exist_ok=True)
    for file in _files(source, options.only):
        if options.failed_in is None or _failed(options.failed_in / f"{_stem(file)}.jsonl"):
            _run(options, source, file)


if __name__ == "__main__":
    main()
