"""The names of Orbax's module `pathways`, for programs that ask whether they run on that backend."""

from __future__ import annotations

__all__ = ("CheckpointingImpl", "register_type_handlers")

from typing import Any, NoReturn

from penstock.orbax.common.checkpointing_impl import CheckpointingImpl


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
