"""Tiers of a manager: where steps are kept before they are in the root."""

from __future__ import annotations

__all__ = ("Disk", "Memory", "Tier", "as_tiers", "path_of")

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast, final

from penstock.handlers.stores.publishing.paths import OF_PROCESSES, path_or_url, scheme_of
from penstock.kernel.errors import SpecError
from penstock.kernel.options import fit
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.steps.keep_policies import KeepEvery, KeepLast, KeepPolicy, as_keep_policy
from penstock.steps.save_policies import EverySteps, SavePolicy, as_save_policy

if TYPE_CHECKING:
    from penstock.config.config import TierOptions

DEFAULT_KEEP: Final = 2
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
        codec: As of `SaveFormat`; by default none: a step is encoded on its way to the root. Not in a job of
            several processes, where a step is saved with the codec that it has in the root.

    Raises:
        SpecError: If an option does not fit.
    """

    path: str | os.PathLike[str]
    keep: KeepPolicy | int = DEFAULT_KEEP
    save_when: SavePolicy | int | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.path), str | os.PathLike):
            raise SpecError(f"a tier is at a path, not at {self.path!r}")
        if self.codec is not None:
            SaveFormat(codec=self.codec)  # which refuses what is no codec

        object.__setattr__(self, "path", path_or_url(self.path))
        object.__setattr__(self, "keep", as_keep_policy(self.keep))
        object.__setattr__(self, "save_when", as_save_policy(self.save_when))


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of this machine, held by a keeper: a process that outlives the training.

    The keeper is started when the manager is opened, unless one runs. It needs Linux, and memory for two
    steps more than it keeps; with peers for four, and for the copies of others. Where there can be none, or
    it is lost, steps are saved into the next tier.

    ```python
    CheckpointManager("s3://bucket/run", tiers=Memory(keep=2))   # or tiers="memory"
    ```

    Attributes:
        keep: As of `Disk`.
        save_when: As of `Disk`.
        peers: In a job of several processes: to the keepers of how many other hosts each step goes, once it
            is kept. Then so many hosts may be lost. It goes over TCP, not encrypted.
        limit_bytes: How much memory its keeper may take: a number, or a text such as `"64GiB"`; `"auto"` for
            half of what is free. One that runs already keeps its own limit.
        step_bytes: About how many bytes of a step this process saves. When the manager is opened, pages for
            the first one are made ready: fresh pages take longer than the save. `"auto"`: as many as the
            newest step has, and none if there is none.

    Raises:
        SpecError: If an option does not fit.
    """

    keep: KeepPolicy | int = DEFAULT_KEEP
    save_when: SavePolicy | int | None = None
    limit_bytes: int | str = "auto"
    peers: int = 0
    step_bytes: int | str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", as_keep_policy(self.keep))
        object.__setattr__(self, "save_when", as_save_policy(self.save_when))
        for name in ("limit_bytes", "step_bytes"):
            try:
                fitting = fit(getattr(self, name), int | Literal["auto"], name, positive=True)
            except ValueError as error:
                raise SpecError(f"{name} of a tier in memory {error}") from None

            object.__setattr__(self, name, fitting)
        if not isinstance(cast("object", self.peers), int) or self.peers < 0:
            raise SpecError(f"peers of a tier in memory is how many hosts, not {self.peers!r}")


Tier: TypeAlias = Disk | Memory


def as_tiers(
    given: Tier | Iterable[Tier] | Literal["memory"] | None, root: str, configured: Sequence[TierOptions] = ()
) -> Sequence[Tier]:
    """Return the tiers before a root, the nearest first.

    Args:
        given: By the caller; None for those of the configuration.
        root: The directory of steps.
        configured: `[[tier]]`.

    Raises:
        SpecError: If something is no tier, or two are in one place.
    """
    if given is None:
        tiers: tuple[Tier, ...] = tuple(map(_tier_of, configured))
    elif given == "memory":
        tiers = (Memory(),)
    elif isinstance(given, Disk | Memory):
        tiers = (given,)
    elif isinstance(cast("object", given), Iterable) and not isinstance(given, str):
        tiers = tuple(given)
    else:
        raise SpecError(
            f"tiers is a tier such as Disk('/nvme/run'), or several, the nearest first, not {given!r}"
        )

    for tier in tiers:
        if not isinstance(cast("object", tier), Disk | Memory):
            raise SpecError(f"a tier is a value such as Disk('/nvme/run'), not {tier!r}")

    for one, other in combinations([*[path_of(tier, root) for tier in tiers], root], 2):
        if one == other or one.startswith(os.path.join(other, "")) or other.startswith(os.path.join(one, "")):
            raise SpecError(f"tiers and the root need directories apart from each other: {one!r}, {other!r}")

    return tiers


def _tier_of(options: TierOptions) -> Tier:
    keep = KeepLast(options.keep_last)
    kept = keep if options.keep_every is None else keep | KeepEvery(options.keep_every)
    when = None if options.save_every is None else EverySteps(options.save_every)
    if options.kind == "memory":
        return Memory(kept, when, options.limit_bytes, options.peers, options.step_bytes)

    assert options.path is not None, "the options refuse it"
    return Disk(options.path, keep=kept, save_when=when, codec=options.codec)


def path_of(tier: Tier, root: str, process: int | None = None) -> str:
    """Return the directory of a tier of a root.

    Args:
        tier: Which.
        root: Of a run.
        process: The index of this process, if it is one of several: each has a directory in its keeper.
    """
    if isinstance(tier, Disk):
        return str(tier.path)

    scheme = scheme_of(root)  # the keeper has the steps of many roots
    inside = f"local{root}" if scheme is None else f"{scheme}/{root.partition('://')[2]}"
    return path_or_url(f"keeper:///{inside}") if process is None else f"{OF_PROCESSES}/{process}/{inside}"
