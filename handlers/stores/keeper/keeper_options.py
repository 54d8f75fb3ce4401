"""`[store.keeper]`: how the keeper of this host is reached."""

from __future__ import annotations

__all__ = ("FILE_BYTES", "KeeperOptions")

from dataclasses import dataclass, field
from typing import ClassVar, Final, final

from penstock.kernel.options import fit_fields

FILE_BYTES: Final = 4 * 2**30


@final
@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """The options of paths that begin with `keeper:///`.

    Attributes:
        socket: Where the keeper listens; None for `$XDG_RUNTIME_DIR/penstock/keeper`, or else
            `/tmp/penstock-UID/keeper`.
        answer_s: How long an answer may take, in seconds. Then the keeper counts as lost.
        concurrency: Threads of one save that write at once, and of one restore that read. The option
            `concurrency` of the stages `write` and `read` comes first.
        file_bytes: A data file that has grown so large is followed by another one. A leaf that is longer is
            cut into chunks, and so not mapped as a whole.
    """

    socket: str | None = None
    answer_s: float = field(default=10.0, metadata={"positive": True})
    concurrency: int = field(default=4, metadata={"positive": True})
    file_bytes: int = field(default=FILE_BYTES, metadata={"positive": True})
    section: ClassVar[str] = "store.keeper"

    def __post_init__(self) -> None:
        fit_fields(self, self.section)
