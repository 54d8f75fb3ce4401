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

from tests.programs import drivers
from tests.programs.program import Program

LIBRARIES = ("orbax", "penstock")
ROOT = Path(__file__).parents[2]


def programs(only: str) -> Iterator[tuple[str, Program]]:
    """Yield the programs whose name contains a text, with the names of their modules."""
    for found in iter_modules(drivers.__path__):
        name = f"{drivers.__name__}.{found.name}"
        if only in found.name:
            yield name, import_module(name).PROGRAM


def bring(program: Program, sources: Path) -> Sequence[str]:
    """Install its wheels and fetch its repository, unless they are here; return the paths to import from."""
    site = sources / "site"
    absent = [one for one in program.wheels if not _is_installed(site, one)]
    if absent:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        subprocess.run([*install, "--upgrade", *absent], check=True)

    if not program.repository:
        return [str(site)]

    name, _, commit = program.repository.partition("@")
    folder = sources / program.folder
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", f"https://github.com/{name}", str(folder)], check=True)
        subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", commit], check=True)

    return [str(folder / program.path), str(site)]


def _is_installed(site: Path, wheel: str) -> bool:
    name, _, version = wheel.partition("==")
    return (site / f"{name.replace('-', '_')}-{version}.dist-info").exists()


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
        flags = f"--xla_force_host_platform_device_count={program.devices}"
        path = os.pathsep.join([*paths, str(ROOT / "src"), str(ROOT)])
        self._environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    def remove(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def differences(self) -> dict[str, str]:
        """Run all; return what differs, by the name of the fact or of the test."""
        found = dict[str, str]()
        if self._program.tests is not None:
            found |= _different(*map(self._tests, LIBRARIES), "")
        if not hasattr(import_module(self._module), "save"):
            return found

        saved = {library: self._run("save", library, library) for library in LIBRARIES}
        found |= _different(saved["orbax"], saved["penstock"], "")
        read = {
            (library, writer): self._run("restore", library, writer)
            for library in LIBRARIES
            for writer in LIBRARIES
        }
        found |= _different(read["orbax", "orbax"], read["penstock", "penstock"], "")
        found |= _different(read["orbax", "orbax"], read["penstock", "orbax"], " (written by Orbax)")
        found |= _different(read["orbax", "orbax"], read["orbax", "penstock"], " (read by Orbax)")
        return found

    def _run(self, part: str, library: str, writer: str) -> Mapping[str, Any]:
        directory, results = self._scratch / writer, self._scratch / "results"
        if part == "restore":  # each reader gets what was saved, whatever the one before it did
            directory = Path(shutil.copytree(directory, self._scratch / f"{writer}_for_{library}"))
        directory.mkdir(exist_ok=True)
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.programs.one_program", self._module, part]
        self._call([*command, str(directory), str(results), "--library", library])
        return json.loads(results.read_text()) if results.exists() else {"failed": "it did not end"}

    def _tests(self, library: str) -> Mapping[str, Any]:
        assert self._program.tests is not None
        results = self._scratch / f"{library}.xml"
        folder = self._environment["PYTHONPATH"].partition(os.pathsep)[0]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            f"tests.programs.with_{library}",
            "-o",
            "addopts=",
        ]
        command += [
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            f"--junitxml={results}",
            "--timeout",
            "120",
        ]
        for name in self._program.tests.deselected:
            command += ["--deselect", name]
        self._call([*command, *[str(Path(folder, file)) for file in self._program.tests.files]])
        if not results.exists():
            return {"failed": "it did not end"}

        cases = ElementTree.parse(results).iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}": _outcome(case) for case in cases}

    def _call(self, command: Sequence[str]) -> None:
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

    @property
    def output(self) -> str:
        """What they printed."""
        return (self._scratch / "output").read_text()


def _outcome(case: ElementTree.Element) -> str:
    kinds = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
    return kinds[0] if kinds else "passed"


def _different(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the facts of Orbax that are others with penstock."""
    if "failed" in theirs:
        return {f"failed with Orbax{where}": str(theirs["failed"])}
    if "failed" in ours:
        return {f"failed{where}": str(ours["failed"])}

    names = sorted(theirs.keys() | ours.keys())
    return {
        f"{name}{where}": f"{_short(theirs.get(name, '-'))} != {_short(ours.get(name, '-'))}"
        for name in names
        if theirs.get(name, "-") != ours.get(name, "-")
    }


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 1_500 else f"{text[:1_500]}..."


def main() -> int:
    """Run all, and print the table; return 1 if one differs, and its driver does not say why."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--sources", type=Path, default=ROOT / "build" / "programs", help="wheels and repositories"
    )
    parser.add_argument("--only", default="", help="drivers whose name contains this")
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--verbose", action="store_true", help="print what the programs print")
    parser.add_argument("--page", type=Path, help="where the table goes, too")
    options = parser.parse_args()
    lines = ["| program | from | works | different, and why |", "| --- | --- | --- | --- |"]
    unknown = 0
    for module, program in programs(options.only):
        runs = Runs(module, program, bring(program, options.sources.resolve()), options.limit_s)
        try:
            found = runs.differences()
            if options.verbose:
                _say(runs.output)
        finally:
            runs.remove()

        for name in found.keys() - program.meant.keys():
            unknown += "*" not in program.meant
            sys.stderr.write(f"{module}: {name}: {found[name]}\n")
        reasons = "; ".join(
            dict.fromkeys(program.meant.get(name, program.meant.get("*", "?")) for name in found)
        )
        source = program.repository or ", ".join(program.wheels)
        lines.append(f"| {program.name} | {source} | {'no' if found else 'yes'} | {reasons} |")
        _say(lines[-1])

    if options.page is not None:
        options.page.write_text(_PAGE + "\n".join(lines) + "\n")

    return int(unknown > 0)


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
