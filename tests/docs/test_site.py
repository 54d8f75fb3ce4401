"""The site shows every page and every public name, and its links lead somewhere. `make docs` builds it."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from inspect import ismodule
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = DOCS / "reference" / "api"
DESCRIBED = (
    *("penstock", "penstock.items", "penstock.steps", "penstock.pipelines", "penstock.sync"),
    *("penstock.errors", "penstock.testing", "penstock.kernel", "penstock.stages", "penstock.handlers"),
)
WITH_EXAMPLES = (
    *("checkpointer", "errors", "handlers", "items", "kernel", "options", "pipelines", "reports", "rules"),
    *("stages", "steps", "sync", "testing", "tools"),
)
"""All pages that describe names of penstock; that of Orbax's names has a table."""
DIRECTIVE = re.compile(r"^::: (penstock[\w.]*)$", re.MULTILINE)
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def in_the_menu() -> set[str]:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return set(re.findall(r"([\w./-]+\.md)$", menu, re.MULTILINE))


def own_names(module: str) -> set[str]:
    found = import_module(module)
    return {name for name in found.__all__ if not ismodule(getattr(found, name))}


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "site" / "hooks.py"))


def test_every_page_is_in_the_menu_or_in_an_index_or_comes_last(hooks: dict[str, Any]) -> None:
    above = set(hooks["ABOVE"].values())
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("design/")}  # which stay in the repository
    by_their_index = {page for page in pages if re.match(r"examples/\w+/", page)}

    listed = in_the_menu() - above
    assert listed <= pages
    assert pages - by_their_index - listed == set(hooks["not_in_the_menu"](listed))


def test_every_public_name_is_described(hooks: dict[str, Any]) -> None:
    text = "\n".join(hooks["with_the_rest"](path.read_text()) for path in sorted(API.glob("*.md")))
    directives = DIRECTIVE.findall(text)
    described = {name.rpartition(".")[2] for name in directives}
    names = {name for module in DESCRIBED for name in own_names(module)}

    assert names - described == {"__version__"}
    assert {name for name in directives if not hasattr(*_split(name))} == set()
    assert len(directives) > 300


def _split(name: str) -> tuple[Any, str]:
    module, _, last = name.rpartition(".")
    return import_module(module), last


def test_every_public_name_has_an_example(hooks: dict[str, Any]) -> None:
    """One below its description, or at the end of its group."""
    without: list[str] = []
    for page in WITH_EXAMPLES:
        text = hooks["with_the_rest"]((API / f"{page}.md").read_text())
        _, *parts = re.split(r"^::: ", text, flags=re.MULTILINE)
        for at, part in enumerate(parts):
            name, _, rest = part.partition("\n")
            if rest.strip() or at == len(parts) - 1:
                without += [] if CODE.search(rest) else [name]

    assert without == []


def test_links_lead_to_pages_of_the_site(hooks: dict[str, Any]) -> None:
    pages = {"index.md", "examples/README.md", "examples/plain_loop.md", "design/README.md", "changelog.md"}
    text = (
        "[a](../../CHANGELOG.md#x) [b](../examples/plain_loop.py) [c](../design) [d](https://e.org) ![e](s)\n"
    )

    changed = hooks["with_links"](text, "howto/x.md", "docs/howto/x.md", pages, "")

    assert changed == (
        "[a](../changelog.md#x) [b](../examples/plain_loop.md) [c](../design/README.md) [d](https://e.org) "
        "![e](s)\n"
    )


def test_links_to_other_files_name_them_or_lead_to_the_source(hooks: dict[str, Any]) -> None:
    text = "[`t`](../../tests/t.py)\n\n```python\n[x](y)\n```\n"
    code = "\n\n```python\n[x](y)\n```\n"

    named = hooks["with_links"](text, "howto/x.md", "docs/howto/x.md", set(), "")
    linked = hooks["with_links"](text, "howto/x.md", "docs/howto/x.md", set(), "https://e.org/blob/main")

    assert named == '<span class="file" title="tests/t.py" markdown="span">`t`</span>' + code
    assert linked == "[`t`](https://e.org/blob/main/tests/t.py)" + code


def test_pages_of_the_design_are_not_on_the_site(hooks: dict[str, Any]) -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    text = "[why](../design/saving.md#cancellation-and-failure)"
    source = "https://e.org/blob/main"

    changed = hooks["with_links"](text, "howto/x.md", "docs/howto/x.md", {"howto/x.md"}, source)

    assert "\n  /design/\n" in settings.partition("exclude_docs: |")[2].partition("\n\n")[0]
    assert [page for page in in_the_menu() if page.startswith("design/")] == []
    assert changed == "[why](https://e.org/blob/main/docs/design/saving.md#cancellation-and-failure)"


def test_the_search_ranks_what_to_do_before_every_name(hooks: dict[str, Any]) -> None:
    boost = hooks["boost"]

    assert boost("howto/watch-it.md") > boost("reference/events.md") > boost("reference/api/steps.md")
    assert {page for page, _ in hooks["BOOSTS"] if not _begins_a_page(page)} == set()


def _begins_a_page(begin: str) -> bool:
    return begin in ("changelog", "contributing", "security") or any(DOCS.glob(f"{begin}*"))


def test_words_of_the_search_lead_to_pages_that_are_there(hooks: dict[str, Any]) -> None:
    words = [word for line in hooks["WORDS"].values() for word in line.split()]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages |= set(hooks["example_pages"]().values())

    assert set(hooks["WORDS"]) <= pages
    assert sorted(words) == sorted(set(words))
    assert words == [word.lower() for word in words]


def test_a_page_opened_from_a_folder_has_a_search_and_fetches_nothing_from_elsewhere() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()

    assert "\n  - offline" in settings
    assert "\n  polyfills: [site/iframe-worker.js]" in settings  # a name that the plugin looks for
    assert 'location.protocol === "file:"' in (DOCS / "site" / "iframe-worker.js").read_text()


def test_each_word_of_the_glossary_has_two_sentences_and_is_the_only_one(hooks: dict[str, Any]) -> None:
    terms: dict[str, str] = hooks["terms"]()
    text = (DOCS / "explanation" / "glossary.md").read_text()
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    asked = "leaf actor document range seal default stage pipeline message piece chunk pack lease budget"
    asked += " milestone staged durable step item layout store coordinator"

    assert headings == list(terms)
    assert len(set(headings)) == len(headings)
    assert set(asked.split()) <= set(terms)
    sentences = {term: len(re.findall(r"[.](?= [A-Z`]|$)", meaning)) for term, meaning in terms.items()}
    assert {term: n for term, n in sentences.items() if n != 2} == {}


def test_terms_lead_to_the_glossary_where_a_page_uses_them_first(hooks: dict[str, Any]) -> None:
    with_terms = hooks["with_terms"]
    text = "# A budget\n\nA `budget` in [a budget](x.md). Its budget. The budget.\n\n| budget |\n"

    changed = with_terms(text, "howto/x.md")

    place = "../explanation/glossary.md#budget"
    assert changed.startswith(
        f"# A budget\n\nA `budget` in [a budget](x.md). Its [budget]({place}){{ .term title="
    )
    assert changed.endswith(" }. The budget.\n\n| budget |\n")
    assert with_terms(text, "explanation/glossary.md") == text
    assert with_terms(text, "reference/api/steps.md") == text


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("It leaves nothing, and each leaves in one request.", []),
        ("An event loop, and an event.", ["event"]),
        ("In a source tree, and a worker\nthread.", []),
        ("All leaves are read.", ["leaves"]),
        ("The store reads a range of it.", ["store", "range"]),
        ("They store what ranges over it.", []),
        ("A worker thread, and a worker.", ["worker"]),
        ("```python\nlease = 1\n```\n\nLeases end.", ["Leases"]),
        ("**Staged.** A staged-copy, `staged`.", ["Staged"]),
        ("By default each checkpoint", []),
    ],
)
def test_only_what_is_meant_is_taken_for_a_term(hooks: dict[str, Any], text: str, linked: list[str]) -> None:
    changed = hooks["with_terms"](text, "howto/x.md")

    assert sorted(re.findall(r"\[(\w+)\]\(\.\./explanation/glossary", changed)) == sorted(linked)
    assert re.sub(r"\[(\w+)\]\([^)]*\)\{[^}]*\}", r"\1", changed) == text


def test_the_recording_of_the_demo_is_of_the_demo_of_today(hooks: dict[str, Any]) -> None:
    acts = (ROOT / "src" / "penstock" / "demo" / "acts.py").read_text()
    headlines = re.findall(r'headline\("(.*?)"\)', acts)
    lines = [line.strip() for line in hooks["demo_text"]().splitlines()]

    assert len(headlines) == 4
    assert [line for line in headlines if f"== {line}" not in lines] == []
    assert any(line.startswith("Bit-equal: all") for line in lines)
    assert max(map(len, lines)) <= 52
    assert hooks["DEMO"] in (DOCS / "index.md").read_text()


def test_every_program_has_its_page(hooks: dict[str, Any]) -> None:
    programs = {path.name for path in (DOCS / "examples").glob("*.py")}

    assert {Path(name).name for name in hooks["example_pages"]()} == programs
    for name in hooks["example_pages"]():
        text = hooks["example_text"](name)
        assert text.startswith("# ")
        (code,) = CODE.findall(text)
        compile(code, name, "exec")


def test_the_picture_of_the_figures_is_drawn_from_its_script() -> None:
    script = runpy.run_path(str(DOCS / "site" / "draw_benchmarks.py"))

    assert (DOCS / "benchmarks.svg").read_text() == script["picture"]()


def test_what_is_fetched_from_elsewhere_is_found(tmp_path: Path) -> None:
    problems = runpy.run_path(str(DOCS / "site" / "check_site.py"))["problems"]
    (tmp_path / "good.html").write_text('<script src="a.js"></script><a href="https://e.org">e</a>')
    assert problems(tmp_path) == [f"{tmp_path}: there is no search index"]

    (tmp_path / "bad.html").write_text(
        '<script defer src="https://e.org/a.js"></script><p>::: penstock.x</p>'
    )
    (tmp_path / "bad.css").write_text("@import url(//fonts.e.org/x)")
    assert len(problems(tmp_path)) == 4
