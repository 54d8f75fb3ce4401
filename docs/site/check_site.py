"""Looks through the built site for what a browser would fetch from elsewhere, and searches it as readers do.

`python docs/site/check_site.py build/site`
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(https?:)?//[^\"'> ]*"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|icon|preload|preconnect))"
    r"[^>]*\bhref=[\"']?(https?:)?//[^\"'> ]*",
    re.IGNORECASE,
)
FETCHED_BY_STYLE = re.compile(r"(?:@import\s+(?:url\()?|url\()[\"']?(?:https?:)?//[^\"') ]*")
DIRECTIVE = re.compile(r"<p>:::")
WANTED = {
    "examples/data_iterator.html": "dataset grain",
    "examples/equinox_model.html": "equinox",
    "examples/flax_nnx.html": "flax nnx",
    "examples/optax_state.html": "optax",
    "examples/plain_numpy.html": "numpy",
    "explanation/memory.html": "memory oom",
    "explanation/staged-and-durable.html": "async donate",
    "howto/choose-a-format.html": "compression zstd",
    "howto/choose-intervals.html": "daly mtbf interval",
    "howto/configure.html": "configure toml",
    "howto/convert-and-verify.html": "convert export",
    "howto/find-the-bottleneck.html": "slow bottleneck performance",
    "howto/hand-a-model-to-others.html": "huggingface safetensors",
    "howto/keep-steps.html": "keep best metrics latest delete",
    "howto/many-processes.html": "multihost distributed",
    "howto/move-from-orbax.html": "orbax migrate",
    "howto/recover-a-damaged-checkpoint.html": "corrupted corrupt damaged",
    "howto/restore-onto-something-else.html": "sharding mesh partial",
    "howto/restore-without-reading.html": "mmap",
    "howto/save-only-what-changed.html": "incremental",
    "howto/save-to-a-bucket.html": "s3 gcs azure bucket",
    "howto/serve-without-a-stall.html": "server inference",
    "howto/stop-in-good-order.html": "preemption slurm sigterm cancel",
    "howto/use-it-without-an-event-loop.html": "jupyter notebook sync",
    "howto/watch-it.html": "prometheus opentelemetry logging",
    "howto/write-a-stage.html": "encrypt quantize",
    "explanation/glossary.html": "glossary",
    "install.html": "install",
    "reference/command-line.html": "cli",
    "reference/errors.html": "error",
    "reference/supported.html": "tpu gpu windows",
    "tutorial/first-checkpoint.html": "resume tutorial",
}
"""What somebody types, word by word, and the page that is to come first."""


def problems(site: Path) -> list[str]:
    """What is wrong with a built site, a line for each."""
    found: list[str] = []
    for path in sorted(site.rglob("*.html")):
        text = path.read_text()
        found += [f"{path}: fetches {match[0]}" for match in FETCHED.finditer(text)]
        found += [f"{path}: a directive was not carried out" for _ in DIRECTIVE.findall(text)]
    for path in sorted(site.rglob("*.css")):
        found += [f"{path}: fetches {match[0]}" for match in FETCHED_BY_STYLE.finditer(path.read_text())]
    index = site / "search" / "search_index.json"
    if not index.exists():
        return [*found, f"{site}: there is no search index"]
    if not index.with_suffix(".js").exists():
        found.append(f"{site}: opened from a folder it has no search index")

    best = searched(json.loads(index.read_text()))
    wanted = [(query, page) for page, queries in WANTED.items() for query in queries.split()]
    return found + [
        f"{site}: a search for {query!r} ends at {best(query)}, not at {page}"
        for query, page in wanted
        if best(query) != page
    ]


def searched(index: dict[str, Any]) -> Callable[[str], str | None]:
    """Return a function from a word to the page that a search for it shows first, as the theme searches."""
    from lunr import get_default_builder  # which no test needs
    from lunr.stop_word_filter import stop_word_filter

    config, builder = index["config"], get_default_builder()
    builder.pipeline.reset()  # of which the theme has the filter alone
    builder.pipeline.add(stop_word_filter)
    builder.search_pipeline.reset()
    builder.b(0)
    builder.ref("location")
    for name, options in config["fields"].items():
        builder.field(name, boost=options["boost"])
    for section in index["docs"]:
        fields = {name: words(section.get(name, ""), config["separator"]) for name in config["fields"]}
        builder.add({"location": section["location"], **fields}, {"boost": section.get("boost", 1)})

    return partial(first_page, builder.build())


def words(text: str | list[str], separator: str) -> list[str]:
    """Return the words of a text without its tags."""
    plain = re.sub(r"<[^>]*>", " ", text if isinstance(text, str) else " ".join(text))
    return [word for word in re.split(separator, html.unescape(plain).lower()) if word]


def first_page(index: Any, word: str) -> str | None:
    """Return the page of the best hit; the theme prefers the beginning of a page to its sections."""
    scores: dict[str, float] = {}
    for hit in index.search(f"{word}*"):
        page, _, section = hit["ref"].partition("#")
        scores[page] = max(scores.get(page, 0.0), hit["score"] * (2 if section else 5))

    return max(scores, key=lambda page: scores[page], default=None)


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
