"""Orbax and penstock in one program: penstock's names in Orbax's place, and Orbax's classes in ours.

`install()` puts public modules of penstock in the place of Orbax's, and leads those that are not public to
them, as far as public programs import these. What has no counterpart yet can be imported, and refuses to be.
"""

from __future__ import annotations

__all__ = (
    "NEVER_CALLED",
    "PRIVATE_MODULES",
    "Counterpart",
    "Installation",
    "NotThereYetError",
    "OrbaxInUseError",
    "WarnsOfOverrides",
    "install",
    "loaded_orbax",
    "stand_for",
)

import sys
import warnings
from abc import ABCMeta
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Final, Self, final

from penstock import kernel
from penstock.errors import PenstockError

# Libraries that were written for Orbax derive handlers and arguments from Orbax's base classes, and make
# Orbax's `SaveArgs`. A program that uses them has imported Orbax, so what it made is recognised by asking
# `sys.modules`. Orbax is never imported for it.
ORBAX: Final = "orbax.checkpoint"


class Counterpart(metaclass=ABCMeta):
    """Base of a class whose instances are also those of a class of Orbax, derived ones included."""

    _ORBAX_CLASS: ClassVar[tuple[str, str]]  # the public module of Orbax, and the name there

    @classmethod
    def __subclasshook__(cls, other: type, /) -> bool:
        place = vars(cls).get("_ORBAX_CLASS")  # a derived class stands for nothing but itself
        module = None if place is None else loaded_orbax(place[0])
        theirs = None if place is None else getattr(module, place[1], None)
        return True if theirs is not None and theirs in other.__mro__ else NotImplemented


def loaded_orbax(module: str = "") -> Any | None:
    """Return a module of Orbax if the program has imported it, and penstock does not stand in its place.

    Args:
        module: Its name below `orbax.checkpoint`.
    """
    found = sys.modules.get(f"{ORBAX}.{module}" if module else ORBAX)
    return found if found is not None and found.__name__.startswith(ORBAX) else None


def stand_for(name: str, ours: type) -> None:
    """Make instances of a class of ours those of a class of Orbax, too, if the program has imported Orbax.

    Libraries ask: flax waits for an `orbax.checkpoint.AsyncCheckpointer`, and for no other.

    Args:
        name: Of Orbax's class, which is abstract or derives from an abstract one.
        ours: The class.
    """
    theirs: Any = getattr(loaded_orbax(), name, None)
    if isinstance(theirs, ABCMeta):
        theirs.register(ours)


_OURS: Final = "penstock.orbax"

NEVER_CALLED: Final[Mapping[str, tuple[str, ...]]] = {
    "CheckpointManager": (
        *("_add_checkpoint_info", "_configure_checkpointer_common", "_finalize", "_get_metrics"),
        *("_configure_checkpointer_from_handler_registry", "_configure_checkpointer_legacy_init"),
        *("_configure_checkpointer_from_item_names_and_handlers", "_get_read_step_directory"),
        *("_get_root_metadata", "_get_save_directory", "_get_step_metadata", "_get_write_step_directory"),
        *("_is_continuous_checkpointing_enabled", "_maybe_await_cleanup_tmp_directory"),
        *("_maybe_get_default_item", "_maybe_save_root_metadata", "_metrics_handler"),
        *("_root_metadata_file_path", "_sort_checkpoints_by_metrics", "_validate_args"),
        *("_wait_for_checkpointers",),
    ),
    "Checkpointer": (
        *("_restore", "_save_step_metadata", "create_temporary_path", "get_temporary_path"),
        *("synchronize_next_awaitable_signal_operation_id",),
    ),
    "AsyncCheckpointer": ("_make_on_commit_callback", "_prepare_destination_async", "_save"),
    "PyTreeCheckpointHandler": ("_get_internal_metadata", "_maybe_deserialize", "_read_aggregate_file"),
    "BasePyTreeCheckpointHandler": (
        *("_async_partial_save", "_finalize_async", "_get_param_infos", "_get_param_infos_with_write_shape"),
        *("_maybe_deserialize", "_partial_restore_with_omission", "_partial_restore_with_placeholders"),
        *("_read_metadata_file", "_write_metadata_after_commits", "_write_metadata_file", "get_param_names"),
    ),
    "ArrayCheckpointHandler": ("_is_supported_type",),
    "CompositeCheckpointHandler": (
        *("_get_all_registered_and_unregistered_items_and_handlers", "_get_item_handlers"),
        *("_get_item_metadata", "_get_item_temporary_directory", "_get_metadata_base", "_items_exist"),
    ),
}
"""By class: names that methods of Orbax's class ask `self` for, and those of ours do not."""


class WarnsOfOverrides:
    """Base of classes that have hooks in Orbax: overriding one that nothing calls is a UserWarning."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ours = [base.__name__ for base in cls.__mro__ if base.__module__.startswith(_OURS)]
        names = sorted({name for one in ours for name in NEVER_CALLED.get(one, ())} & vars(cls).keys())
        if names and not cls.__module__.startswith(_OURS):
            warnings.warn(
                f"{cls.__qualname__} overrides {', '.join(names)}, which Orbax calls and penstock never does",
                stacklevel=2 + isinstance(cls, ABCMeta),  # which makes classes in Python
            )


_ALSO_IMPORTED: Final = "jax.experimental.array_serialization.serialization"
"""A module that programs use without importing it, because Orbax does."""
_NAMESPACE, _, _CHILD = ORBAX.partition(".")

_EXPERIMENTAL: Final = f"{ORBAX}.experimental"
_PRIVATE_PACKAGES: Final = ("_src", "experimental")  # programs reach them as attributes, too


@final
class OrbaxInUseError(PenstockError, RuntimeError):
    """Modules hold objects of Orbax already, so that a program would mix the two libraries.

    Attributes:
        holders: The names of these modules.
    """

    def __init__(self, holders: Sequence[str]) -> None:
        super().__init__(
            f"Orbax is in use already, by {', '.join(holders)}: install penstock in its place before these "
            "are imported, or run the program with `python -m penstock.orbax`"
        )
        self.holders = tuple(holders)


@final
class Installation:
    """penstock in the place of Orbax, until it is removed. A context manager, which removes it."""

    def __init__(self, finder: _Finder) -> None:
        self._finder = finder

    def remove(self) -> None:
        """Let imports of Orbax lead to Orbax again. What was imported meanwhile stays. Idempotent."""
        self._finder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()


def install() -> Installation:
    """Make each import of `orbax.checkpoint` in this process one of `penstock.orbax`, from now on.

    Whether Orbax is installed does not matter. `orbax.checkpoint.v1` and `orbax.checkpoint.experimental.v1`
    are `penstock.orbax.v1`. Private modules of Orbax that public programs import lead to penstock's names.
    Modules that this API does not have cannot be imported meanwhile: the error says so, rather than that
    two libraries are mixed. The log says so, once; a second call changes nothing.

    Returns:
        The handle that takes it back.

    Raises:
        OrbaxInUseError: If a module holds objects of Orbax already. It is a RuntimeError.
    """
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return Installation(finder)

    holders = _holders()
    if holders:
        raise OrbaxInUseError(holders)

    finder = _Finder()
    finder.put_in_place()
    kernel.get_logger().info("orbax.replaced", imports_of=ORBAX, lead_to=_OURS)
    return Installation(finder)


@final
class _Finder(MetaPathFinder, Loader):
    """Finds the modules of Orbax's API in penstock's. As the first of all finders, it decides alone."""

    def __init__(self) -> None:
        self._hidden: dict[str, ModuleType] = {}

    def put_in_place(self) -> None:
        """Replace the loaded modules of Orbax, unless they are in use, by penstock's."""
        self._hidden = _take_out()
        import_module(_ALSO_IMPORTED)
        for flag in _flags():
            flag.define()
        sys.meta_path.insert(0, self)
        for name in _PRIVATE_PACKAGES:  # importing sets the attribute of what stands for their parent
            import_module(f"{ORBAX}.{name}")

    def remove(self) -> None:
        """Undo that."""
        if self not in sys.meta_path:
            return

        sys.meta_path.remove(self)
        for flag in _flags():
            flag.drop()
        _take_out()
        for name in _PRIVATE_PACKAGES:
            vars(import_module(_OURS)).pop(name, None)
        sys.modules.update(self._hidden)
        namespace = sys.modules.get(_NAMESPACE)
        if ORBAX in self._hidden:
            setattr(namespace, _CHILD, self._hidden[ORBAX])
        if getattr(getattr(namespace, "__spec__", None), "loader", None) is self:  # there is no Orbax at all
            del sys.modules[_NAMESPACE]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Answer for Orbax's modules.

        Raises:
            ModuleNotFoundError: If penstock has none of this name.
        """
        if fullname == _NAMESPACE:  # that of other packages, too
            others = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
            return next(filter(None, others), None) or ModuleSpec(fullname, self, is_package=True)
        if not _is_orbax(fullname):
            return None
        if _ours(fullname) is None:
            raise ModuleNotFoundError(
                f"{_OURS} stands in the place of {ORBAX}, and has no {fullname.removeprefix(ORBAX + '.')!r}",
                name=fullname,
            )

        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Put penstock's module into the place of an empty one."""
        found = _ours(module.__name__) if _is_orbax(module.__name__) else None
        if found is not None:
            sys.modules[module.__name__] = found


def _flags() -> Iterable[Any]:
    multihost: Any = import_module(f"{_OURS}.multihost")
    names = ("USE_DISTRIBUTED_BARRIER", "USE_DISTRIBUTED_PROCESS_ID")
    return [getattr(multihost, f"EXPERIMENTAL_ORBAX_{name}") for name in names]


def _ours(name: str) -> ModuleType | None:
    """Return penstock's module for one of Orbax; None if there is none."""
    below = name.removeprefix(f"{ORBAX}.")
    if below in PRIVATE_MODULES or below in _PACKAGES:
        return _PrivateModule(below)

    inner = name.replace(f"{_EXPERIMENTAL}.", f"{ORBAX}.", 1).removeprefix(ORBAX)
    found = import_module(_OURS)
    for part in inner.split(".")[1:]:
        value: Any = getattr(found, part, None) if part in getattr(found, "__all__", ()) else None
        if not isinstance(value, ModuleType):
            return None
        found = value

    return found


def _is_orbax(name: str) -> bool:
    return name == ORBAX or name.startswith(f"{ORBAX}.")


def _take_out() -> dict[str, ModuleType]:
    """Remove the replacements of Orbax from `sys.modules`; return them."""
    namespace = sys.modules.get(_NAMESPACE)
    if namespace is not None:
        vars(namespace).pop(_CHILD, None)

    return {name: sys.modules.pop(name) for name in tuple(sys.modules) if _is_orbax(name)}


def _holders() -> list[str]:
    """The modules, apart from Orbax's own, that hold a module, class, function or object of Orbax."""
    if ORBAX not in sys.modules:
        return []

    others = {name: one for name, one in sys.modules.items() if name.partition(".")[0] != _NAMESPACE}
    return sorted(name for name, one in others.items() if any(map(_is_of_orbax, tuple(_contents(one)))))


def _contents(module: object) -> Iterable[object]:
    return vars(module).values() if isinstance(module, ModuleType) else ()


def _is_of_orbax(value: object) -> bool:
    if isinstance(value, ModuleType):
        return _is_orbax(value.__name__) or value is sys.modules.get(_NAMESPACE)  # `import orbax.checkpoint`

    return _is_orbax(str((value if isinstance(value, type | FunctionType) else type(value)).__module__))


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

NOT_THERE_YET: Final[Mapping[str, Sequence[str]]] = {
    "experimental.emergency.multi_tier_checkpointing.initialization": (
        "initialize_multi_tier_checkpointing",
    ),
}
"""Names of the service that copies between machines, by module: programs import them (MaxText)."""


@final
class NotThereYetError(PenstockError, NotImplementedError):
    """A program asks for Orbax's service that copies checkpoints between machines, which penstock has not.

    Attributes:
        name: What it asked for.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: penstock has no service that copies between machines; tiers of "
            "penstock.CheckpointManager, and emergency.checkpoint_manager.CheckpointManager, need none"
        )
        self.name = name


class _NotThereYet:
    """Base of the classes that stand for what is not there: they refuse to be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotThereYetError(type(self).__name__)


PRIVATE_MODULES: Final[Mapping[str, Sequence[str]]] = {
    **_HANDLERS,
    "_src.arrays.sharding": ("arrays",),  # MaxText
    "_src.checkpoint_managers.preservation_policy": ("policies",),  # MaxText
    "_src.checkpoint_managers.save_decision_policy": ("policies",),  # MaxText
    "_src.checkpointers.async_checkpointer": ("checkpointers",),
    "_src.checkpointers.checkpointer": ("checkpointers",),
    "_src.futures.future": ("future",),
    "_src.handlers.handler_registration": ("checkpoint_args",),
    "_src.metadata.array_metadata_store": ("type_handlers",),  # AXLearn
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
    "experimental.emergency.checkpoint_manager": ("emergency",),  # MaxText, DeepRTE
    "experimental.emergency.replicator_checkpoint_manager": ("emergency",),
    **dict.fromkeys(NOT_THERE_YET, ()),
    "experimental.model_surgery.transformations.nesting": ("transform_utils",),  # Qwix
    "experimental.model_surgery.transformations.renaming": ("transform_utils",),  # Qwix
}
"""Names below `orbax.checkpoint`, and the modules of `penstock.orbax` that have what is in them."""

_PACKAGES: Final = frozenset(
    name.rsplit(".", depth)[0] for name in PRIVATE_MODULES for depth in range(1, name.count(".") + 1)
)


@final
class _PrivateModule(ModuleType):
    """Looks names up in public modules of penstock's.

    Args:
        name: Of the module of Orbax, below its package.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{ORBAX}.{name}")
        self.__dict__["_places"] = PRIVATE_MODULES.get(name, ())
        for absent in NOT_THERE_YET.get(name, ()):
            self.__dict__[absent] = type(absent, (_NotThereYet,), {"__module__": self.__name__})
        if name in _PACKAGES:
            self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for place in self.__dict__["_places"]:
                module = import_module(f"{_OURS}.{place}")
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
