"""Whether what the package index will link to is there: asked of the network, and so only by itself."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tests.release.places import project

__all__ = ("check_addresses", "silent")


def check_addresses() -> None:
    """Ask for each address that the package names.

    Raises:
        SystemExit: If one does not answer.
    """
    missing = silent(project()["urls"])
    if missing:
        said = "\n".join([f"  {name}: {why}" for name, why in missing.items()])
        raise SystemExit(
            f"what the package links to is not there:\n{said}\n"
            "Publish the repository, or change its address in pyproject.toml, mkdocs.yml and README.md."
        )

    print("  all are there")


def silent(urls: Mapping[str, str], limit_s: float = 10.0) -> dict[str, str]:
    """Return the addresses at which there is nothing, each with what was said instead."""
    found: dict[str, str] = {}
    for name, url in urls.items():
        try:
            with urlopen(Request(url, method="HEAD"), timeout=limit_s):
                pass
        except HTTPError as error:
            error.close()
            found[name] = f"{url} answers {error.code}"
        except (URLError, TimeoutError) as error:
            found[name] = f"{url} does not answer: {error}"

    return found
