"""Run one test file of Orbax, and write a line of JSON for each of its tests.

    python -m tests.proofs.orbax_tests.one_file SOURCE FILE RESULTS --library penstock

Tests that the file of results has already are not run again, so that a run that was killed can go on. A test
that was begun there and has no end is one that the process did not survive.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import socket
import sys
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tests.proofs.orbax_tests.entered import Entered
from tests.proofs.orbax_tests.private_patches import allow_private_patches
from tests.proofs.orbax_tests.substitution import Substitution, View

_MANY_PROCESSES = "multiprocess_test"


class Results(unittest.TestResult):
    """Each test has its own time limit, and a line in the file of results.

    Args:
        path: The file that lines are added to.
        limit_s: Seconds that one test may take.
    """

    def __init__(self, path: Path, limit_s: int) -> None:
        super().__init__()
        self._file = path.open("a")
        self._limit_s = limit_s
        self._began = 0.0
        self._status = "passed"
        self._why = ""
        self._entered = Entered()
        self._entered.start()

    def say(self, **line: Any) -> None:
        """Add a line."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def startTest(self, test: unittest.TestCase) -> None:
        """Begin a test."""
        super().startTest(test)
        self._entered.clear()
        self._began, self._status, self._why = time.monotonic(), "passed", ""
        self.say(test=_name(test), status="begun")
        signal.alarm(self._limit_s)

    def stopTest(self, test: unittest.TestCase) -> None:
        """End a test, and write what came of it."""
        signal.alarm(0)
        seconds = round(time.monotonic() - self._began, 2)
        entered = len(self._entered.names)
        self.say(test=_name(test), status=self._status, seconds=seconds, why=self._why, entered=entered)
        super().stopTest(test)

    def addError(self, test: Any, err: Any) -> None:
        """Note an error, in the test or in what sets its class up."""
        self._failed(err)
        if not isinstance(test, unittest.TestCase):
            self.say(test=str(test), status="failed", seconds=0, why=self._why)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """Note a failed assertion."""
        del test
        self._failed(err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        """Note a failure in a part of a test."""
        del test, subtest
        if err is not None:
            self._failed(err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Note a test that does not want to run here."""
        del test
        self._status, self._why = "skipped", reason

    def _failed(self, err: Any) -> None:
        self._status = "failed"
        frames = traceback.extract_tb(err[2])
        where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))
        said = traceback.format_exception_only(err[0], err[1])[0].strip()  # and not its notes
        self._why = f"{said[:600]} [{where}]"


class TookTooLongError(Exception):
    """A test did not end within its limit."""


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TookTooLongError


def _name(test: unittest.TestCase) -> str:
    # Its id may end with the parameters, and these with addresses.
    return f"{type(test).__name__}.{vars(test).get('_testMethodName', '')}"


def _each(suite: unittest.TestSuite) -> Iterator[unittest.TestSuite]:
    for inner in suite:
        if isinstance(inner, unittest.TestSuite):
            yield inner


def _chosen(suite: unittest.TestSuite, done: set[str], sample: int) -> unittest.TestSuite:
    """Return the tests that are still to run; of one method's parameters, so many spread over all."""
    groups: dict[str, list[Any]] = {}
    for test in suite:
        name = _name(test) if isinstance(test, unittest.TestCase) else str(test)
        groups.setdefault(name.rstrip("0123456789"), []).append(test)

    kept: list[Any] = []
    for tests in groups.values():
        stride = max(1, -(-len(tests) // sample)) if sample else 1
        kept += tests[::stride]
    return unittest.TestSuite(test for test in kept if _name(test) not in done)


def _compare_types_alone(
    test: unittest.TestCase, expected: Any, said: object, *args: Any, **kwargs: Any
) -> Any:
    """Stand for `assertRaisesRegex`, whatever an error says."""
    del said
    return test.assertRaises(expected, *args, **kwargs)  # noqa: PT027, it stands for one of theirs


def _uses(module: ModuleType, substitution: Substitution) -> set[str]:
    """Return the names of penstock that a file reaches through what it imports."""
    bases = [one for one in substitution.helpers() if not one.__name__.endswith(".test_utils")]
    for one in {module, *bases}:
        for node in ast.walk(ast.parse(Path(str(one.__file__)).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                holder = getattr(one, node.value.id, None)
                if isinstance(holder, View):
                    getattr(holder, node.attr, None)

    return substitution.used


def _one_process(source: str) -> None:
    """Start JAX's service for one process, where a file is written for several."""
    import jax
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    if _MANY_PROCESSES in source:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        jax.distributed.initialize(f"localhost:{port}", num_processes=1, process_id=0)


def main() -> None:
    """Run the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--library", choices=("orbax", "penstock"), default="penstock")
    parser.add_argument("--limit-s", type=int, default=30)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--test", default="")
    parser.add_argument("--failed-in", type=Path, help="only tests that did not pass in this file of results")
    parser.add_argument("--types-alone", action="store_true", help="do not compare the words of errors")
    options = parser.parse_args()
    if options.types_alone:
        unittest.TestCase.assertRaisesRegex = _compare_types_alone  # type: ignore[method-assign, assignment]
    options.source, options.results = options.source.absolute(), options.results.absolute()
    os.chdir(options.source)  # where tests look for files that lie beside them

    _one_process((options.source / options.file).read_text())
    done: Counter[str] = Counter()
    if options.results.exists():
        done.update(json.loads(line)["test"] for line in options.results.read_text().splitlines())
    if options.failed_in is not None:
        lines = [json.loads(line) for line in options.failed_in.read_text().splitlines()]
        done.update(line["test"] for line in lines if line["status"] in ("passed", "skipped"))

    signal.signal(signal.SIGALRM, _too_long)
    substitution = Substitution(options.source, active=options.library == "penstock")
    if options.library == "penstock":
        allow_private_patches()
    results = Results(options.results, options.limit_s)
    path = options.source / options.file
    name = str(options.file.with_suffix("")).replace("/", ".")
    try:
        module = substitution.run(path, name)
    except Exception as error:
        traceback.print_exc()
        results.say(test="", status="import", why=f"{type(error).__name__}: {error}")
        os._exit(0)

    uses = sorted(_uses(module, substitution))
    results.say(test="", status="uses", why=uses)
    if substitution.replaced and not uses:
        results.say(test="", status="end", why="uses nothing of penstock")
        os._exit(0)

    for suite in _each(unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromModule(module)])):
        for tests in _each(suite):
            chosen = _chosen(tests, set(done), options.sample)
            wanted = unittest.TestSuite(test for test in chosen if options.test in _name(test))  # type: ignore[arg-type]
            wanted.run(results)
    results.say(test="", status="end", why="")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
