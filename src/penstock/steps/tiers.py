"""Tiers of a manager: where steps are kept before they are in the root."""

from __future__ import annotations

__all__ = ("Disk", "as_tiers")

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias, cast, final

from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.kernel.errors import SpecError
from penstock.steps.keep_policies import KeepPolicy, as_keep_policy
from penstock.steps.save_policies import SavePolicy, as_save_policy

DEFAULT_KEEP = 2
"""One step is whole while the next one is copied on."""


@final
@dataclass(frozen=True, slots=True)
class Disk:
    """A directory that steps are saved into first, because it is faster than the root.

    A saved step is copied on in the background, to the next tier that wants it and at last to the root. It is
    not deleted here before that is done, or a newer step is whole here.

    ```python
    CheckpointManager("s3://bucket/run", keep=KeepLast(5), tiers=Disk("/nvme/run", keep=3))
    ```

    Attributes:
        path: A directory of this tier alone; made if it does not exist. It serves one root.
        keep: Which steps stay here; the last one always does. `3` means `KeepLast(3)`.
        save_when: Which of the steps offered to `save` come here; by default all. `100` is `EverySteps(100)`.

    Raises:
        SpecError: If an option does not fit.
    """

    path: str | os.PathLike[str]
    keep: KeepPolicy | int = DEFAULT_KEEP
    save_when: SavePolicy | int | None = None

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.path), str | os.PathLike):
            raise SpecError(f"a tier is at a path, not at {self.path!r}")

        object.__setattr__(self, "path", path_or_url(self.path))
        object.__setattr__(self, "keep", as_keep_policy(self.keep))
        object.__setattr__(self, "save_when", as_save_policy(self.save_when))


Tier: TypeAlias = Disk


def as_tiers(given: Tier | Iterable[Tier], root: str) -> Sequence[Tier]:
    """Return the tiers before a root, the nearest first.

    Raises:
        SpecError: If something is no tier, or two are in one place.
    """
    if isinstance(given, Disk):
        tiers: tuple[Tier, ...] = (given,)
    elif isinstance(cast("object", given), Iterable) and not isinstance(given, str):
        tiers = tuple(given)
    else:
        raise SpecError(
            f"tiers is a tier such as Disk('/nvme/run'), or several, the nearest first, not {given!r}"
        )

    for tier in tiers:
        if not isinstance(cast("object", tier), Disk):
            raise SpecError(f"a tier is a value such as Disk('/nvme/run'), not {tier!r}")

    for one, other in combinations([*[str(tier.path) for tier in tiers], root], 2):
        if one == other or one.startswith(os.path.join(other, "")) or other.startswith(os.path.join(one, "")):
            raise SpecError(f"tiers and the root need directories apart from each other: {one!r}, {other!r}")

    return tiers
