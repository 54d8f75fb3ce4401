"""What the site adds to the pages of docs/: the programs of examples/, and pages that lie above docs/.

Pages link files of the repository as they lie in it. On the site a link to a program leads to its page,
and a link to a file that is not part of the site names the file, or leads to `extra.source` if that is set.
"""

from __future__ import annotations

import ast
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
REST = re.compile(r"^<!-- the rest of ([\w.]+) -->$", re.MULTILINE)
API = ROOT / "docs" / "reference" / "api"
BOOSTS = (
    ("design/", 0.2),
    ("changelog", 0.2),
    ("tutorial/", 3.0),
    ("howto/", 3.0),
    ("install", 3.0),
    ("explanation/", 2.0),
)
"""How much a page counts in the search, by how its name begins: who searches wants to do something first."""
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
            return f"[{label}]({source}/{path})"
        return f'<span class="file" title="{path}" markdown="span">{label}</span>'

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(changed, part) for part in parts)


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
            modules = ("errors", "items", "pipelines", "steps", "sync") if module == "penstock" else ()
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
    above = {shown: name for name, shown in ABOVE.items()}
    extra = cast("dict[str, Any]", config.extra)
    pages = {file.src_uri for file in files}
    markdown = with_the_rest(markdown)
    return with_links(markdown, here, above.get(here, f"docs/{here}"), pages, extra.get("source", ""))
