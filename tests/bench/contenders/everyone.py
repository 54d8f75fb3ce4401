"""The contenders of a run."""

from __future__ import annotations

from tests.bench.contenders import files, penstock, raw
from tests.bench.contenders.protocol import Blocking


def ours() -> list[penstock.Penstock]:
    return penstock.variants()


def others(*, with_orbax: bool = True) -> list[Blocking]:
    """Everybody else; Orbax, which takes seconds to import, may be left out."""
    found: list[Blocking] = []
    if with_orbax:
        from tests.bench.contenders import orbax

        found.extend(orbax.variants())

    n_writers, n_readers = penstock.n_threads("save"), penstock.n_threads("restore")
    return [
        *found,
        *files.variants(),
        raw.Buffered(n_writers, n_readers),
        raw.Direct(n_writers),
        raw.Direct(n_writers, checksums=True),
    ]
