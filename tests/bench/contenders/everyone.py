"""The contenders of a run."""

from __future__ import annotations

from tests.bench.contenders import files, jax_alone, penstock, raw
from tests.bench.contenders.protocol import Blocking


def ours(*, all_ways: bool = False) -> list[penstock.Penstock]:
    """penstock's variants; `all_ways` as in `Workload`."""
    return penstock.variants(all_ways=all_ways)


def others(*, with_orbax: bool = True, in_shards: bool = False, all_ways: bool = False) -> list[Blocking]:
    """Everybody else; Orbax, which takes seconds to import, may be left out.

    Args:
        with_orbax: Whether it is there.
        in_shards: Whether all leaves are divided by rows, and jax's own calls for that are a contender.
        all_ways: As in `Workload`.
    """
    found: list[Blocking] = [jax_alone.JaxAlone()] if in_shards else []
    if with_orbax:
        from tests.bench.contenders import orbax

        found.extend(orbax.variants())
        if all_ways:
            found.extend(orbax.more_variants())

    n_writers, n_readers = penstock.n_threads("save"), penstock.n_threads("restore")
    return [
        *found,
        *files.variants(),
        raw.Buffered(n_writers, n_readers),
        raw.Direct(n_writers),
        raw.Direct(n_writers, checksums=True),
    ]
