"""How each leaf of a conversion was made, as its custom metadata tells it."""

from __future__ import annotations

__all__ = ("made_by",)

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.handlers.leaves.stored_value import StoredValue
from penstock.kernel.rules import MADE_BY, Rules
from penstock.stages.rules.derived import Derivation, DerivedCheckpoint


def made_by(
    source: str, rules: Rules, leaves: Iterable[tuple[str, object]], before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the custom metadata of what rules make: that of the source, and how each leaf was made.

    Args:
        source: Path of the source.
        rules: Those that were carried out.
        leaves: Of the result, each with its dotted name. What is stored so in the source is left out.
        before: The custom metadata of the source. What was recorded there of earlier rules is kept.
    """
    made: dict[str, Any] = {}
    for name, value in leaves:
        if not isinstance(value, StoredValue) or not isinstance(value.checkpoint, DerivedCheckpoint):
            continue

        about = value.stored.detail
        if isinstance(about, Derivation):
            digests = value.checkpoint.source.digests
            made[name] = {
                "of": {one: digests[one].hex() if one in digests else None for one in about.sources},
                "rules": [number + 1 for number in about.rules],
            }

    known = dict(before or {})
    record: dict[str, Any] = {"source": source, "rules": [rule.table() for rule in rules], "leaves": made}
    if MADE_BY in known:
        record["before"] = known[MADE_BY]

    return {**known, MADE_BY: record}
