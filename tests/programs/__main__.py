"""Run public programs that were written for Orbax, unchanged, on Orbax and on penstock: `make programs`.

Each is brought as it is released, or as it is in its repository. It saves and restores with each library, and
restores what the other wrote; its own tests are run with both. Of what differs the page says why.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any
from xml.etree import ElementTree

from tests.programs import drivers, own_tests
from tests.programs.facts import differences
from tests.programs.program import Program, Tests

ROOT = Path(__file__).parents[2]


def programs(only: str) -> Iterator[tuple[str, Program]]:
    """Yield the programs whose name contains a text, with the names of their modules."""
    for found in iter_modules(drivers.__path__):
        name = f"{drivers.__name__}.{found.name}"
        if only in found.name:
            yield name, import_module(name).PROGRAM


def bring(program: Program, sources: Path) -> Sequence[str]:
    """Install its wheels and fetch its repositories, unless they are here; return where to import from."""
    paths = list[str]()
    for repository in filter(None, (program.repository, *program.others)):
        name, _, commit = repository.partition("@")
        folder = sources / name.replace("/", "+")
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", f"https://github.com/{name}", str(folder)], check=True)
            subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", commit], check=True)
        paths.append(str(folder / program.path if repository == program.repository else folder))

    for wheel in program.wheels:  # a folder for each: programs may need others of one name
        site = sources / "site" / wheel
        if not site.exists():
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
            subprocess.run([*install, wheel], check=True)
        paths.append(str(site))

    return paths


class Runs:
    """The runs of one program, below a folder that is removed at the end.

    Args:
        module: The module that drives it.
        program: What it declares.
        paths: To import it from.
        limit_s: For one run.
    """

    def __init__(self, module: str, program: Program, paths: Sequence[str], limit_s: float) -> None:
        self._module = module
        self._program = program
        self._limit_s = limit_s
        self._scratch = Path(tempfile.mkdtemp(prefix="program-"))
        self._paths = paths
        flags = f"--xla_force_host_platform_device_count={program.devices}"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    def remove(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def output(self) -> str:
        """What they printed."""
        return (self._scratch / "output").read_text()

    def differences(self) -> dict[str, str]:
        """Run all; return what differs, by the name of the fact or of the test."""
        found = dict[str, str]()
        if self._program.tests is not None:
            theirs, ours = (self._test(library, self._program.tests) for library in ("orbax", "penstock"))
            found |= differences(theirs, ours)
        if not hasattr(import_module(self._module), "save"):
            return found

        saved = {library: self._run("save", library, library) for library in ("orbax", "penstock")}
        found |= differences(_named("saved", saved["orbax"]), _named("saved", saved["penstock"]))

        read = {
            (library, writer): _named("restored", self._run("restore", library, writer))
            for library in saved
            for writer in saved
        }
        theirs = read["orbax", "orbax"]
        found |= differences(theirs, read["penstock", "penstock"])
        found |= differences(theirs, read["penstock", "orbax"], " (written by Orbax)")
        found |= differences(theirs, read["orbax", "penstock"], " (read by Orbax)")

        # A driver that names what it saved and what it restored alike says that they are.
        both = {name: fact for name, fact in saved["orbax"].items() if f"restored {name}" in theirs}
        lost = differences(
            _named("restored", both), {name: theirs[name] for name in _named("restored", both)}
        )
        return found | {f"failed with Orbax: {name}": text for name, text in lost.items()}

    def _run(self, part: str, library: str, writer: str) -> Mapping[str, Any]:
        directory, results = self._scratch / writer, self._scratch / "results"
        if part == "restore":  # each reader gets what was saved, whatever the one before it did
            directory = Path(shutil.copytree(directory, self._scratch / f"{writer}_for_{library}"))
        directory.mkdir(exist_ok=True)
        results.unlink(missing_ok=True)
        program = ["--library", library, *(f"--path={path}" for path in self._paths)]
        self._call("tests.programs.one_program", self._module, part, directory, results, *program)
        return json.loads(results.read_text()) if results.exists() else {"failed": "it did not end"}

    def _test(self, library: str, tests: Tests) -> Mapping[str, Any]:
        results = self._scratch / f"{library}.xml"
        folder = Path(self._paths[0])
        plain = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--timeout=120", f"--rootdir={folder}"]
        plugin = ["-p", "tests.programs.own_tests"]
        self._environment |= own_tests.settings(self._module, library, self._paths)
        left_out = [f"--deselect={name}" for name in tests.deselected]
        left_out += [] if tests.conftest else ["--noconftest"]
        files = [folder / file for file in tests.files]
        self._call("pytest", *plain, *plugin, *left_out, f"--junitxml={results}", *files)
        if not results.exists():
            return {"failed": "it did not end"}

        cases = ElementTree.parse(results).iter("testcase")
        found = {f"{case.get('classname')}.{case.get('name')}": _outcome(case) for case in cases}
        return found if "passed" in found.values() else {"failed": "no test passes"}

    def _call(self, module: str, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with (self._scratch / "output").open("a") as output:
            try:
                subprocess.run(
                    command,
                    stdout=output,
                    stderr=output,
                    timeout=self._limit_s,
                    check=False,
                    env=self._environment,
                    cwd=self._scratch,
                )
            except subprocess.TimeoutExpired:
                output.write(f"more than {self._limit_s} s\n")


def _named(when: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    return facts if "failed" in facts else {f"{when} {name}": fact for name, fact in facts.items()}


def _outcome(case: ElementTree.Element) -> str:
    kinds = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
    return kinds[0] if kinds else "passed"


def main() -> int:
    """Run all, and print the table; return 1 if one differs, and its driver does not say why."""
    parser = argparse.ArgumentParser()
    sources = ROOT / "build" / "programs"
    parser.add_argument("--sources", type=Path, default=sources, help="wheels and repositories")
    parser.add_argument("--only", default="", help="drivers whose name contains this")
    parser.add_argument("--limit-s", type=float, default=600, help="for one run of a program")
    parser.add_argument("--verbose", action="store_true", help="print what the programs print")
    parser.add_argument("--page", type=Path, help="where the table goes, too")
    options = parser.parse_args()
    lines = ["| program | from | the same | different, and why |", "| --- | --- | --- | --- |"]
    wrong = 0
    _say("\n".join(lines))
    for module, program in programs(options.only):
        runs = Runs(module, program, bring(program, options.sources.resolve()), options.limit_s)
        try:
            found = runs.differences()
            if options.verbose:
                _say(runs.output)
        finally:
            runs.remove()

        # A reason for what is the same has to go from the page.
        unknown = found.keys() ^ program.meant.keys()
        wrong += len(unknown)
        for name in sorted(unknown):
            sys.stderr.write(f"{module}: {name}: {found.get(name, 'is the same')}\n")
        lines.append(_row(program, found))
        _say(lines[-1])

    if options.page is not None:
        options.page.write_text(_PAGE + "\n".join(lines) + "\n")

    return int(wrong > 0)


def _row(program: Program, found: Mapping[str, str]) -> str:
    source = program.repository or ", ".join(program.wheels[:1])
    same = "no" if found.keys() - program.meant.keys() else "but for" if found else "yes"
    reasons = [f"{name}: {program.meant.get(name, 'not known')}" for name in found]
    return f"| {program.name} | {source} | {same} | {'; '.join(reasons)} |"


_PAGE = """# Programs that were written for Orbax

Public programs, as they are released or as they are in their repositories, run with Orbax and with
`penstock.orbax.install()`. Each saves and restores with both, and reads what the other wrote; compared are
trees (containers, dtypes, shardings, bytes), steps, kinds of errors, and names of files. Where a program
brings tests, they are run with both. The page is written by `make programs`.

"""


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
