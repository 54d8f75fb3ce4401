"""Writes what an environment with penstock has, as a bill of materials (CycloneDX), and looks at licences."""

from __future__ import annotations

import json
from pathlib import Path

from tests.release.places import WORK, quietly, tools

__all__ = ("ALLOWED", "bill", "unknown")

ALLOWED = ("apache", "bsd", "isc", "lgpl", "mit", "mpl", "psf", "python software foundation", "zlib", "0bsd")
"""Parts of the names of licences that a program may depend on; lgpl for crc32c alone, which is a library."""

ASKED = """
import json
from importlib.metadata import distributions
found = {}
for each in distributions():
    about = each.metadata
    classes = [c for c in about.get_all("Classifier") or [] if c.startswith("License")]
    classified = "; ".join(c.rpartition(" :: ")[2] for c in classes)
    text = (about.get("License") or "").split(chr(10))[0]
    found[about["Name"]] = [each.version, about.get("License-Expression") or classified or text]
print(json.dumps(found))
"""


def unknown(licences: dict[str, str]) -> list[str]:
    """The packages whose licence is none of those that are allowed."""
    return [name for name, said in licences.items() if not any(word in said.lower() for word in ALLOWED)]


def bill(inside: Path) -> None:
    """Write `build/release/sbom.json` and `licences.md` of what is installed.

    Raises:
        SystemExit: If a package has a licence that is not known to be fine.
    """
    found = json.loads(quietly(inside, "-c", ASKED))
    found = {name: about for name, about in sorted(found.items()) if name not in ("pip", "setuptools")}
    rows = "".join(f"| {name} | {version} | {said} |\n" for name, (version, said) in found.items())
    (WORK / "licences.md").write_text(f"| package | version | licence |\n| --- | --- | --- |\n{rows}")
    sbom = WORK / "sbom.json"
    quietly(
        tools(), "-m", "cyclonedx_py", "environment", inside, "--output-file", sbom, "--output-reproducible"
    )
    if wrong := unknown({name: said for name, (_, said) in found.items()}):
        raise SystemExit(f"licences to look at: {', '.join(wrong)}; see {WORK / 'licences.md'}")

    components = json.loads(sbom.read_text())["components"]
    print(f"  {len(components)} packages in {sbom.name}; each has a licence that is known")
