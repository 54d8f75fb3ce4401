"""Looks through the built site for what a browser would fetch from elsewhere, and for lost directives.

`python docs/site/check_site.py build/site`
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(https?:)?//[^\"'> ]*"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|icon|preload|preconnect))"
    r"[^>]*\bhref=[\"']?(https?:)?//[^\"'> ]*",
    re.IGNORECASE,
)
FETCHED_BY_STYLE = re.compile(r"(?:@import\s+(?:url\()?|url\()[\"']?(?:https?:)?//[^\"') ]*")
DIRECTIVE = re.compile(r"<p>:::")


def problems(site: Path) -> list[str]:
    """What is wrong with a built site, a line for each."""
    found: list[str] = []
    for path in sorted(site.rglob("*.html")):
        text = path.read_text()
        found += [f"{path}: fetches {match[0]}" for match in FETCHED.finditer(text)]
        found += [f"{path}: a directive was not carried out" for _ in DIRECTIVE.findall(text)]
    for path in sorted(site.rglob("*.css")):
        found += [f"{path}: fetches {match[0]}" for match in FETCHED_BY_STYLE.finditer(path.read_text())]
    if not (site / "search" / "search_index.json").exists():
        found.append(f"{site}: there is no search index")

    return found


def main() -> int:
    """Say what is wrong; 1 if anything is."""
    site = Path(sys.argv[1])
    found = problems(site)
    n_pages = len([*site.rglob("*.html")])
    good = f"{site}: {n_pages} pages; nothing is fetched from elsewhere; `make docs-serve` shows them"
    said = "\n".join(found) or good
    sys.stdout.write(f"{said}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
