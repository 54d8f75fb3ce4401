"""Modules of Orbax that are not public, as far as public programs import them: their names lead to ours."""

from __future__ import annotations

__all__ = ("PRIVATE_MODULES", "private_module")

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final, final

from penstock import kernel

_HANDLERS: Final = {
    f"_src.handlers.{name}": ("handlers",)
    for name in (
        "array_checkpoint_handler",
        "async_checkpoint_handler",
        "base_pytree_checkpoint_handler",
        "checkpoint_handler",
        "composite_checkpoint_handler",
        "json_checkpoint_handler",
        "proto_checkpoint_handler",
        "pytree_checkpoint_handler",
        "random_key_checkpoint_handler",
        "standard_checkpoint_handler",
    )
}
"""A checkpoint names its handlers in them, and programs look those names up (Simply)."""

PRIVATE_MODULES: Final[Mapping[str, Sequence[str]]] = {
    **_HANDLERS,
    "_src.arrays.sharding": ("arrays",),  # MaxText
    "_src.checkpoint_managers.preservation_policy": ("policies",),  # MaxText
    "_src.checkpoint_managers.save_decision_policy": ("policies",),  # MaxText
    "_src.checkpointers.async_checkpointer": ("checkpointers",),
    "_src.checkpointers.checkpointer": ("checkpointers",),
    "_src.futures.future": ("future",),
    "_src.handlers.handler_registration": ("checkpoint_args",),
    "_src.metadata.array_metadata_store": ("array_metadata_store",),  # AXLearn
    "_src.metadata.sharding": ("value_metadata",),
    "_src.metadata.tree": ("metadata",),
    "_src.metadata.value": ("value_metadata",),
    "_src.multihost.multihost": ("multihost",),
    "_src.path.step": ("step",),  # gemma
    "_src.serialization.jax_array_handlers": ("type_handlers",),  # Tunix
    "_src.serialization.replica_slices": (),  # gemma replaces a function there
    "_src.serialization.type_handler_registry": ("type_handlers",),  # Tunix
    "_src.serialization.type_handlers": ("type_handlers",),  # AXLearn
    "_src.serialization.types": ("type_handlers",),
    "_src.tree.utils": ("tree", "utils"),
    "experimental.emergency.checkpoint_manager": ("emergency",),  # MaxText
    "experimental.emergency.multi_tier_checkpointing.initialization": ("emergency",),  # MaxText
    "experimental.emergency.replicator_checkpoint_manager": ("emergency",),  # MaxText
    "experimental.model_surgery.transformations.nesting": ("transform_utils",),  # Qwix
    "experimental.model_surgery.transformations.renaming": ("transform_utils",),  # Qwix
}
"""Names below `orbax.checkpoint`, and the modules of `penstock.orbax` that have what is in them."""

_PACKAGES: Final = frozenset(
    name.rsplit(".", depth)[0] for name in PRIVATE_MODULES for depth in range(1, name.count(".") + 1)
)


def private_module(root: str, name: str) -> ModuleType | None:
    """Return what stands for a module of Orbax that is not public; None if no public program imports it.

    Args:
        root: The name of Orbax's package.
        name: Of the module, below it.
    """
    if name not in PRIVATE_MODULES and name not in _PACKAGES:
        return None

    return _PrivateModule(f"{root}.{name}", PRIVATE_MODULES.get(name, ()), is_package=name in _PACKAGES)


@final
class _PrivateModule(ModuleType):
    """Looks names up in public modules of penstock's.

    Args:
        name: Of the module of Orbax.
        places: Modules of `penstock.orbax`.
        is_package: Whether there are modules in it.
    """

    def __init__(self, name: str, places: Sequence[str], *, is_package: bool) -> None:
        super().__init__(name)
        self.__dict__["_places"] = places
        if is_package:
            self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for place in self.__dict__["_places"]:
                module = import_module(f"penstock.orbax.{place}")
                if name in module.__all__:
                    return getattr(module, name)

            if "__path__" in self.__dict__:
                try:
                    return import_module(f"{self.__name__}.{name}")
                except ModuleNotFoundError:
                    pass

        raise AttributeError(
            f"penstock.orbax stands in the place of Orbax, and has no {self.__name__}.{name}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType) and not name.startswith("__"):
            # Some replace functions of Orbax's: penstock does not call them.
            kernel.get_logger().warning("orbax.patch_ignored", name=f"{self.__name__}.{name}")

        super().__setattr__(name, value)
