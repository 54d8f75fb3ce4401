"""`HandlerError`s: no handler for a type, two of them, or one that failed."""

from __future__ import annotations

__all__ = (
    "AmbiguousHandlerError",
    "HandlerFailedError",
    "NoHandlerError",
)

from collections.abc import Sequence
from typing import final

from penstock.kernel.errors.families import HandlerError


@final
class NoHandlerError(HandlerError, TypeError):
    """No handler is registered for the type of a leaf, or for a stored type name.

    Attributes:
        key_path: The leaf.
        type_name: Its Python type, or the type name found on disk.
    """

    def __init__(
        self, key_path: str, type_name: str, known: Sequence[str] = (), *, is_function: bool = False
    ) -> None:
        advice = (
            "Register one with registry.register(Type, handler) and pass the registry to the Checkpointer"
            + (f"; handled here: {', '.join(known)}" if known else "")
        )
        if is_function:
            advice = (
                "It is a function, and belongs to the code: save the rest, in equinox "
                "`eqx.filter(model, eqx.is_array)`, and put both together after a restore, in equinox "
                "`eqx.combine(restored, model)`"
            )

        super().__init__(f"{key_path}: no handler for {type_name}. {advice}")
        self.key_path = key_path
        self.type_name = type_name


@final
class AmbiguousHandlerError(HandlerError, TypeError):
    """Two handlers fit a type equally well.

    Attributes:
        type_name: The type looked up.
        candidates: Both handlers, as `module.QualName`.
    """

    def __init__(self, type_name: str, first: str, second: str) -> None:
        super().__init__(
            f"{type_name}: {first} and {second} fit equally well; register one for the exact type"
        )
        self.type_name = type_name
        self.candidates = (first, second)


@final
class HandlerFailedError(HandlerError):
    """A third-party handler raised; its own error is the cause.

    Attributes:
        key_path: The leaf.
        handler: The handler, as `module.QualName`.
    """

    def __init__(self, key_path: str, handler: str, problem: str) -> None:
        super().__init__(f"{key_path}: {handler} failed: {problem}")
        self.key_path = key_path
        self.handler = handler
