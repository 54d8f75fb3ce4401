"""What a release says of itself agrees: versions, bounds, licences, papers, the workflow with .ci/run."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.release.addresses import silent
from tests.release.bill import unknown
from tests.release.building import normalised
from tests.release.installing import oldest
from tests.release.places import ROOT, project, ten_lines

import penstock
from penstock.handlers.formats import integrity
from penstock.handlers.formats.safetensors import penstock_metadata

SUPPORTED = ROOT / "docs" / "reference" / "supported.md"
VERSIONS = ROOT / "docs" / "reference" / "versions.md"
ROW = re.compile(r"^\| ([\w.-]+) \| ([\d.]+) \| ([\w.]+) \|$", re.MULTILINE)


def supported() -> dict[str, tuple[str, str]]:
    """The table of versions: the oldest and the newest of each."""
    return {name: (first, last) for name, first, last in ROW.findall(SUPPORTED.read_text())}


def as_numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", version)[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))


def test_the_lower_bounds_are_those_of_the_table() -> None:
    bounds = dict(constraint.split("==") for constraint in oldest(project()["dependencies"]))
    table = {name: first for name, (first, _) in supported().items() if name != "Python"}

    assert {name: as_numbers(bound) for name, bound in bounds.items()} == {
        name: as_numbers(first) for name, first in table.items()
    }


def test_the_pythons_are_those_of_the_table_and_the_classifiers() -> None:
    first, last = supported()["Python"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project()["classifiers"]))

    assert project()["requires-python"] == f">={first}"
    assert (named[0], named[-1]) == (first, last)
    assert f"VERSIONS := {' '.join(named)}" in (ROOT / "Makefile").read_text()


def test_the_version_comes_from_one_place() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert "version" not in table["project"]
    assert table["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "penstock.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", penstock.__version__)


def test_the_versions_of_files_are_those_of_the_page() -> None:
    page = VERSIONS.read_text()
    found = dict(re.findall(r"^\| (?:the note )?`(\w+)`[^|]*\| (\d+) \|", page, re.MULTILINE))

    assert found["_PENSTOCK_INTEGRITY"] == str(integrity.VERSION)
    assert found["penstock"] == str(penstock_metadata.VERSION)


@pytest.mark.parametrize("requirement", ["x", "x<2", "x==1"])
def test_a_dependency_without_a_lower_bound_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match="has no lower bound"):
        oldest([requirement])


def test_markers_and_upper_limits_do_not_matter_to_a_lower_bound() -> None:
    assert oldest(["a-b >= 1.2, <2", "c>=3 ; python_version < '4'"]) == ["a-b==1.2", "c==3"]


def packed(names: list[str], mtime: int, mode: int) -> bytes:
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", mtime=mtime) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode, member.uname = 1, mtime, mode, f"user{mtime}"
            tar.addfile(member, io.BytesIO(b"x"))

    return out.getvalue()


def test_two_sdists_that_differ_in_order_time_and_owner_become_one() -> None:
    one = normalised(packed(["a", "b"], 1, 0o600), 1000)
    other = normalised(packed(["b", "a"], 2, 0o644), 1000)

    assert one == other
    assert normalised(one, 1000) == one
    assert normalised(one, 2000) != one


def test_a_licence_that_nobody_knows_is_named() -> None:
    assert unknown({"good": "Apache-2.0", "fine": "MIT License", "bad": "Proprietary", "none": ""}) == [
        "bad",
        "none",
    ]


def test_the_ten_lines_are_a_program() -> None:
    lines = [line for line in ten_lines().splitlines() if line.strip()]

    compile(ten_lines(), "README.md", "exec")
    assert len(lines) <= 14


def test_the_readme_begins_with_the_demo_and_the_installation() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)

    assert headings[:3] == ["See it in a minute", "Install", "Ten lines"]


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    urls = project()["urls"]
    source = urls["Source"]
    site = re.search(r"^  source: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)

    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} <= set(urls)
    assert [url for url in urls.values() if not url.startswith(source)] == []
    assert site is not None
    assert site[1] == f"{source}/blob/main"


def test_links_of_the_readme_work_on_the_package_index() -> None:
    """There it stands alone: each link is whole; those into the repository lead to a file and a heading."""
    source = project()["urls"]["Source"]
    inside = (f"{source}/blob/main/", f"{source.replace('github.com', 'raw.githubusercontent.com')}/main/")
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    links += [url for url in project()["urls"].values() if "/blob/" in url]
    ours = [link.removeprefix(each) for link in links for each in inside if link.startswith(each)]

    assert [link for link in links if not link.startswith("https://")] == []
    assert len(ours) > 20
    assert [link for link in ours if not leads_somewhere(link)] == []
    assert not leads_somewhere("README.md#no-such-heading")
    assert not leads_somewhere("docs/no_such_page.md")


def test_an_address_with_nothing_there_is_told() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/there" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the name is the library's
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        here = f"http://127.0.0.1:{server.server_address[1]}"
        found = silent({"Source": f"{here}/there", "Issues": f"{here}/issues"})
        server.shutdown()

    assert found == {"Issues": f"{here}/issues answers 404"}
    assert list(silent({"Source": f"{here}/there"})) == ["Source"]  # it has ended


def leads_somewhere(link: str) -> bool:
    name, _, anchor = link.partition("#")
    if not (ROOT / name).is_file():
        return False

    headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE)
    return not anchor or anchor in {
        re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
    }


def test_the_hosted_workflow_does_what_ci_does() -> None:
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    runs = re.findall(r"- run: (.*)$", workflow, re.MULTILINE)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert ".ci/run" in runs
    assert {run.removeprefix("make ") for run in runs} - {".ci/run"} <= targets
    named = re.findall(r'"(3\.\d+)"', workflow)
    assert named == re.findall(r"Python :: (3\.\d+)", " ".join(project()["classifiers"]))


def test_a_project_that_others_take_part_in_has_its_papers() -> None:
    papers = ["SECURITY.md", "CONTRIBUTING.md", "LICENSE", ".github/pull_request_template.md"]
    papers += [".github/ISSUE_TEMPLATE/bug.md", ".github/ISSUE_TEMPLATE/wish.md"]

    assert [name for name in papers if not (ROOT / name).read_text().strip()] == []


KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Documentation")


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)

    assert releases[0] == "Unreleased"
    for release in releases[1:]:
        assert re.fullmatch(r"\[?\d+\.\d+\.\d+\]? - \d{4}-\d\d-\d\d", release)
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= set(KINDS)


def test_nothing_of_the_tests_is_in_the_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]

    assert {name.partition(".")[0] for name in packages} == {"penstock"}
    folders = {path.parent for path in (ROOT / "src" / "penstock").rglob("*.py")}
    found = {Path(folder).relative_to(ROOT / "src").as_posix().replace("/", ".") for folder in folders}
    assert found <= set(packages)
