"""The names of Orbax's module `pathways`, for programs that ask whether they run on that backend."""

from __future__ import annotations

__all__ = ("CheckpointingImpl", "register_type_handlers")

from enum import Enum, auto
from typing import Any, NoReturn

from penstock.errors import ConfigError


def register_type_handlers(
    use_single_replica_array_handler: bool = False,
    checkpointing_impl: Any = None,
    **kwargs: Any,
) -> NoReturn:
    """Refuse: penstock has no type handlers for Pathways.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("penstock has no Pathways backend: every process saves its own shards")


class CheckpointingImpl(Enum):
    """The ways to save arrays where one process controls all devices. penstock has only `NO_DISPATCHER`."""

    COLOCATED_PYTHON = auto()
    PERSISTENCE = auto()
    NO_DISPATCHER = auto()

    @classmethod
    def from_options(
        cls, *, use_colocated_python: bool = False, use_persistence_array_handler: bool = False
    ) -> CheckpointingImpl:
        """Return what options of Orbax mean; the first that is set decides."""
        if use_colocated_python:
            return cls.COLOCATED_PYTHON

        return cls.PERSISTENCE if use_persistence_array_handler else cls.NO_DISPATCHER


def check_supported(checkpointing_impl: Any) -> None:
    """Refuse what penstock does not have.

    Args:
        checkpointing_impl: A `CheckpointingImpl`, or Orbax's; None for what the backend needs.

    Raises:
        ConfigError: If it is not `NO_DISPATCHER`. It is a ValueError.
    """
    if checkpointing_impl is not None and checkpointing_impl.name != CheckpointingImpl.NO_DISPATCHER.name:
        raise ConfigError("checkpointing_impl", "must be NO_DISPATCHER: penstock has no Pathways backend")
