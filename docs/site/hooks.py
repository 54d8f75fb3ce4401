"""What the site adds to the pages of docs/: the programs of examples/, and pages that lie above docs/.

Pages link files of the repository as they lie in it. On the site a link to a program leads to its page,
and a link to a file that is not part of the site, such as a page of `design`, leads to `extra.source`.
"""

from __future__ import annotations

import ast
import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ABOVE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
"""Files of the repository's root, and the pages that show them."""

LINK = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
DEMO = "<!-- the demo as text -->"
REST = re.compile(r"^<!-- the rest of ([\w.]+) -->$", re.MULTILINE)
API = ROOT / "docs" / "reference" / "api"
BOOSTS = (
    ("changelog", 0.02),
    ("contributing", 0.02),
    ("security", 0.5),
    ("reference/api/", 0.05),
    ("reference/", 0.5),
    ("tutorial/", 3.0),
    ("howto/move-from-orbax-v1", 2.0),
    ("howto/", 3.0),
    ("install", 3.0),
    ("examples/", 2.0),
    ("explanation/", 2.0),
)
"""How much a page counts in the search, by how its name begins: who searches wants to do something first."""
WORDS = {
    "examples/data_iterator.md": "dataset dataloader grain",
    "examples/flax_nnx.md": "flax",
    "explanation/glossary.md": "terms vocabulary",
    "explanation/memory.md": "oom ram",
    "explanation/staged-and-durable.md": "async asynchronous background blocking donate",
    "howto/choose-a-format.md": "compression compress zstd zarr ocdbt",
    "howto/configure.md": "toml config options settings",
    "howto/convert-and-verify.md": "export verify",
    "howto/find-the-bottleneck.md": "slow profile performance speed",
    "howto/hand-a-model-to-others.md": "huggingface safetensors pytorch",
    "howto/keep-steps.md": "latest best metrics retention delete checkpointmanager",
    "howto/many-processes.md": "multihost multi-host distributed pod",
    "howto/move-from-orbax.md": "orbax migrate",
    "howto/recover-a-damaged-checkpoint.md": "corrupt corrupted damaged broken checksum",
    "howto/restore-onto-something-else.md": "sharding mesh fsdp reshard partial lora",
    "howto/restore-without-reading.md": "mmap lazy",
    "howto/save-only-what-changed.md": "incremental deduplication delta",
    "howto/save-to-a-bucket.md": "s3 gcs gs azure minio r2 bucket cloud",
    "howto/serve-without-a-stall.md": "server serving inference fastapi",
    "howto/stop-in-good-order.md": "preemption preempted slurm spot sigterm cancel",
    "howto/use-it-without-an-event-loop.md": "jupyter notebook ipython colab sync tqdm",
    "howto/watch-it.md": "prometheus grafana opentelemetry logging",
    "howto/write-a-stage.md": "encrypt quantize quantise",
    "reference/command-line.md": "cli terminal",
    "reference/errors.md": "error exception traceback",
    "reference/supported.md": "tpu gpu cuda windows macos versions",
    "tutorial/first-checkpoint.md": "resume quickstart save",
}
"""What somebody types who wants a page. The search looks at these words first."""
GLOSSARY = "explanation/glossary.md"
TERM = re.compile(r"^### (.+)\n(.+)$", re.MULTILINE)
WITH_TERMS = ("tutorial/", "howto/", "explanation/", "reference/", "install")
COMMON = (
    *("batch", "claim", "document", "event", "handler", "item", "job", "layout", "leaf", "manager", "mark"),
    *("message", "pack", "piece", "policy", "profile", "range", "report", "root", "seal", "spec", "stage"),
    *("step", "store", "target", "worker"),
)
"""Words that also mean something else: they are terms where an article or the like stands before them."""
UNLINKED = ("checkpoint", "default")  # what every page is about, and what is nearly always something else
BEFORE = ("the", "its", "new", "your", "small", "large", "other", "of", "in")
BEFORE_ONE = ("a", "an", "each", "every")
BEFORE_SEVERAL = ("all", "many")
OUTSIDE = re.compile(
    r"(^```(?s:.*?)^```$|^(?:#|\||:::| {4}).*$|^<!--(?s:.*?)-->|`[^`\n]*`|<[^>]*>"
    r"|!?\[(?:[^\]\[]|\[[^\]]*\])*\]\([^)]*\)|\*\*)",
    re.MULTILINE,
)
"""What is no prose: code, headings, tables, links and pictures."""
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def example_pages() -> dict[str, str]:
    """The programs of docs/examples, and the pages that show them, both below docs/."""
    found = sorted((ROOT / "docs" / "examples").glob("*.py"))
    return {f"examples/{path.name}": f"examples/{path.stem}.md" for path in found}


def example_text(name: str) -> str:
    """The page of one program: what its docstring says, then all of it."""
    program = (ROOT / "docs" / name).read_text()
    about = ast.get_docstring(ast.parse(program)) or ""
    title = Path(name).stem.replace("_", " ").capitalize()
    shown = program.partition('"""\n')[2].lstrip() if about else program
    return f"# {title}\n\n{about}\n\n```python\n{shown}```\n\nThis is `docs/{name}`. `make test` runs it.\n"


def page_of(path: str, pages: set[str]) -> str | None:
    """The page, below docs/, that shows a file or folder of the repository."""
    if path in ABOVE:
        return ABOVE[path]
    if not path.startswith("docs/"):
        return None

    inside = path.removeprefix("docs/")
    inside = example_pages().get(inside, inside)
    for name in (inside, posixpath.join(inside, "README.md")):
        if name in pages:
            return name

    return None


def with_links(text: str, here: str, file: str, pages: set[str], source: str) -> str:
    """Return a page's text, with links that work on the site.

    Args:
        text: The page, in Markdown.
        here: Where the page is on the site, below docs/.
        file: Where its text lies in the repository.
        pages: Everything that the site has, below docs/.
        source: Where files of the repository can be browsed, or "".
    """

    def changed(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]

        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        page = page_of(path, pages)
        if page is not None:
            return f"[{label}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
        if source:
            return f"[{label}]({source}/{path}{anchor})"
        return f'<span class="file" title="{path}" markdown="span">{label}</span>'

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(changed, part) for part in parts)


def terms() -> dict[str, str]:
    """The words of the glossary, and what it says of each."""
    return dict(TERM.findall((ROOT / "docs" / GLOSSARY).read_text()))


def pattern_of(term: str) -> re.Pattern[str]:
    """What a term looks like in prose: one or several, and at the beginning of a sentence."""
    one = re.escape(term)
    several = {"leaf": "leaves", "policy": "policies"}.get(term, f"{one}s")
    alone = r"\b(?![-'/.]\w|\s+(?:thread|loop))"
    if term not in COMMON:
        return re.compile(rf"(?<!source )\b({several}|{one}){alone}", re.IGNORECASE)

    choices = ((BEFORE, f"{several}|{one}"), (BEFORE_ONE, one), (BEFORE_SEVERAL, several))
    behind = [(rf"(?<=\b(?i:{word}) )", nouns) for words, nouns in choices for word in words]
    return re.compile("|".join(f"{before}(?:{nouns}){alone}" for before, nouns in behind))


def with_terms(text: str, here: str) -> str:
    """Lead each term of the glossary to it where a page uses it first."""
    if here == GLOSSARY or not here.startswith(WITH_TERMS) or here.startswith("reference/api/"):
        return text

    parts = OUTSIDE.split(text)
    glossary = posixpath.relpath(GLOSSARY, posixpath.dirname(here) or ".")
    links: list[str] = []
    for term, meaning in terms().items():
        if term in UNLINKED:
            continue

        title = html.escape(meaning.replace("`", ""))
        anchor = term.replace(" ", "-")
        for at in range(0, len(parts), 2):  # between them is what the pattern found
            found = pattern_of(term).search(parts[at])
            if found:
                # A mark takes its place meanwhile: a later term may be a word of this one's meaning.
                links.append(f'[{found[0]}]({glossary}#{anchor}){{ .term title="{title}" }}')
                parts[at] = f"{parts[at][: found.start()]}\0{len(links) - 1}\0{parts[at][found.end() :]}"
                break

    return re.sub(r"\0(\d+)\0", lambda found: links[int(found[1])], "".join(parts))


def boost(page: str) -> float:
    """How much a page counts in the search; 1 is usual."""
    return next((by for begin, by in BOOSTS if page.startswith(begin)), 1.0)


def not_in_the_menu(listed: set[str]) -> list[str]:
    """How-to and reference pages that the menu lacks; they come last in their part of it."""
    docs = ROOT / "docs"
    found = [path for folder in ("howto", "reference") for path in sorted((docs / folder).glob("*.md"))]
    names = [path.relative_to(docs).as_posix() for path in found]
    return [name for name in names if name not in listed]


def in_menu(menu: object) -> set[str]:
    """The pages of a menu, or of a part of it."""
    if isinstance(menu, str):
        return {menu}
    parts = cast(
        "list[object]", menu if isinstance(menu, list) else [*cast("dict[str, object]", menu).values()]
    )
    return {page for part in parts for page in in_menu(part)}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add to the menu what it lacks."""
    menu = cast("list[dict[str, Any]]", config["nav"])
    for page in not_in_the_menu(in_menu(menu)):
        part = "How to" if page.startswith("howto/") else "Reference"
        (entries,) = [entry[part] for entry in menu if part in entry]
        entries.append(page)

    return config


def public_names(module: str) -> list[str]:
    """The names in a module's `__all__`, without running it; no modules, and not the version."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            modules = (
                ("errors", "items", "pipelines", "rules", "steps", "sync") if module == "penstock" else ()
            )
            return sorted(name for name in names if not name.startswith("__") and name not in modules)

    return []


def with_the_rest(text: str) -> str:
    """Put a directive for each public name that no page describes where a page has the place for it."""
    described = {
        name.rpartition(".")[2]
        for path in API.glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", path.read_text(), re.MULTILINE)
    }

    def directives(found: re.Match[str]) -> str:
        names = [name for name in public_names(found[1]) if name not in described]
        return "\n\n".join(f"::: {found[1]}.{name}" for name in names)

    return REST.sub(directives, text)


def demo_text() -> str:
    """Return what docs/demo.svg shows, as a block of text that stands indented in a page."""
    drawn = (ROOT / "docs" / "demo.svg").read_text()
    lines = [found[1] for found in re.finditer(r"<text [^>]*>(.*)</text>", drawn)]
    return "\n    ".join(["```text", *(html.unescape(line) for line in lines), "```"])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the programs, and the pages that lie above docs/."""
    from mkdocs.structure.files import File

    for program, page in example_pages().items():
        files.append(File.generated(config, page, content=example_text(program)))
    for name, page in ABOVE.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, page, content=(ROOT / name).read_text()))

    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead every link to a page of the site, and say how much the page counts in the search."""
    here = page.file.src_uri
    page.meta["search"] = {"boost": boost(here)}
    page.meta["tags"] = WORDS.get(here, "").split()
    above = {shown: name for name, shown in ABOVE.items()}
    extra = cast("dict[str, Any]", config.extra)
    pages = {file.src_uri for file in files}
    markdown = with_the_rest(markdown).replace(DEMO, demo_text())
    linked = with_links(markdown, here, above.get(here, f"docs/{here}"), pages, extra.get("source", ""))
    return with_terms(linked, here)
