"""`SpecError`s about the tree: a leaf that cannot be saved, a target that does not fit."""

from __future__ import annotations

__all__ = (
    "ChangedLeafError",
    "DeletedLeafError",
    "DuplicateNameError",
    "InvalidLeafError",
    "ResultTypeError",
    "StructureMismatchError",
    "TreeDifference",
)

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from penstock.kernel.errors.families import SpecError


@final
class DuplicateNameError(SpecError):
    """The leaves with the key paths `first` and `second` would both be stored under `name`."""

    def __init__(self, name: str, first: str, second: str) -> None:
        super().__init__(f"{first} and {second} would both be stored as {name!r}; rename one")
        self.name, self.first, self.second = name, first, second
        self.key_path = second


@final
class InvalidLeafError(SpecError, TypeError):
    """The value of a leaf cannot be stored, although its type is handled: an object array, a too large int.

    Attributes:
        key_path: The leaf.
        problem: What is wrong with it, and what to do.
    """

    def __init__(self, key_path: str, problem: str) -> None:
        super().__init__(f"{key_path}: {problem}")
        self.key_path, self.problem = key_path, problem


@final
class DeletedLeafError(SpecError, RuntimeError):
    """A jax.Array was donated or deleted before its bytes were taken."""

    def __init__(self, key_path: str) -> None:
        problem = "was deleted or donated before it was staged; await save.staged() before donating it"
        super().__init__(f"{key_path}: the array {problem}")
        self.key_path = key_path


@final
class ChangedLeafError(SpecError):
    """A stage changed a leaf's dtype, shape or length and had not declared that: nothing was published.

    Attributes:
        key_path: The leaf.
        planned: How it was to be stored.
        found: What it has become.
    """

    def __init__(self, key_path: str, planned: str, found: str) -> None:
        advice = "a stage that changes leaves declares that by a method resolve_spec, and keeps to it"
        super().__init__(f"{key_path} was planned as {planned} and has become {found}; {advice}")
        self.key_path, self.planned, self.found = key_path, planned, found


@dataclass(frozen=True, slots=True)
class TreeDifference:
    """One way in which a restore target and a checkpoint disagree."""

    kind: str  #: "missing" (target only), "unexpected" (checkpoint only), "shape", "dtype", "type", "rule"
    key_path: str
    in_like: str = ""  #: what the target has there
    on_disk: str = ""  #: what the checkpoint has there
    suggestion: str = ""  #: the nearest name on the other side, if one is near

    def __str__(self) -> str:
        text = f"{self.kind:<11} {self.key_path}: {self.in_like} in the target, {self.on_disk} on disk"
        if self.kind == "missing":
            text = f"missing     {self.key_path}: in the target ({self.in_like}), not on disk"
        elif self.kind == "unexpected":
            text = f"unexpected  {self.key_path}: on disk ({self.on_disk}), not in the target"
        elif self.kind == "rule":  # a rename or a transform that cannot be carried out
            text = f"rule        {self.key_path}: {self.in_like}"

        return text + (f"; did you mean {self.suggestion}?" if self.suggestion else "")


def _accepting(path: str, differences: Sequence[TreeDifference]) -> list[str]:
    """Return lines that say which options would accept differences; none for a broken rule."""
    kinds = {difference.kind for difference in differences}
    if not kinds or "rule" in kinds:
        return []

    options: list[str] = []
    advice: list[str] = []
    other = [difference.key_path for difference in differences if difference.kind in {"shape", "type"}]
    if other:
        shown = ", ".join(f"{key_path!r}: None" for key_path in other[:3])
        options.append(f"rename={{{shown}{', ...' if len(other) > 3 else ''}}}")
        advice.append("rename leaves out what is stored there (strict=False pads arrays or cuts them off)")
    if "dtype" in kinds:
        options.append('dtype="like"')
        advice.append('dtype="like" casts to the dtypes of the target')
    if other or "missing" in kinds:
        options.append('on_missing="keep"')
        advice.append('on_missing="keep" keeps what the target has and the checkpoint has not')
    if "unexpected" in kinds:
        options.append('on_unexpected="skip"')
        advice.append('on_unexpected="skip" leaves out what only the checkpoint has')

    return [f"accepted by: restore({path!r}, like=..., {', '.join(options)})", *advice]


@final
class StructureMismatchError(SpecError):
    """The restore target and the checkpoint differ; every difference is listed.

    Attributes:
        path: The checkpoint.
        differences: All of them: first missing, then unexpected leaves, then those that differ.
    """

    SHOWN = 40

    def __init__(self, path: str, differences: Sequence[TreeDifference]) -> None:
        lines = [str(difference) for difference in differences[: self.SHOWN]]
        if len(differences) > self.SHOWN:
            lines.append(f"... and {len(differences) - self.SHOWN} more")

        lines += _accepting(path, differences)
        super().__init__("\n  ".join([f"the target does not fit {path}:", *lines]))
        self.path, self.differences = path, tuple(differences)


@final
class ResultTypeError(SpecError, TypeError):
    """The result is not of the type that `as_type` asked for.

    Attributes:
        path: The checkpoint.
        as_type: The type asked for.
        found: The type of what was restored.
    """

    def __init__(self, path: str, as_type: object, result: object) -> None:
        wanted = as_type.__name__ if isinstance(as_type, type) else str(as_type)
        super().__init__(f"{path} was restored as a {type(result).__name__}, and as_type asks for {wanted}")
        self.path, self.as_type, self.found = path, as_type, type(result)
