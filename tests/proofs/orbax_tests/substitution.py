"""What a test file of Orbax imports: Orbax's modules, with penstock's classes in the place of its own.

A test file is run in a namespace whose `__import__` is `Substitution.imported`. What it imports from
`orbax.checkpoint` is a `View` of the true module. An attribute of a view that penstock's face has, too,
whether it was reached by its public or its private name, is penstock's; everything else is Orbax's own.
Orbax's own modules are left as they are, so that what a test compares with is not changed.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = "orbax.checkpoint"
_FACES = ((_ROOT, "penstock.orbax"), (f"{_ROOT}.experimental.v1", "penstock.orbax.v1"))
_V1 = f"{_ROOT}.experimental.v1._src"
_ALSO = {
    f"{_ROOT}._src.metadata.sharding": (
        "penstock.orbax.value_metadata",
        ("DeviceMetadata", "DeviceMetadataMesh", "from_jax_sharding", "from_serialized_string"),
    ),
    f"{_V1}.serialization.array_leaf_handler": ("penstock.orbax.v1.pytree_handler", ("ArrayMetadata",)),
    f"{_V1}.serialization.numpy_leaf_handler": ("penstock.orbax.v1.pytree_handler", ("NumpyMetadata",)),
    f"{_V1}.context.context": ("penstock.orbax.v1.options", ("get_context",)),
    f"{_V1}.handlers.pytree_handler": (
        "penstock.orbax.v1.errors",
        ("PartialSaveReplacementError",),
    ),
    f"{_V1}.handlers.registration": (
        "penstock.orbax.v1.handler_registration",
        ("NoEntryError", "resolve_handler_for_load", "resolve_handler_for_save"),
    ),
    f"{_V1}.serialization.registry": (
        "penstock.orbax.v1.serialization",
        ("AlreadyRegisteredTypeError", "UnregisteredTypeError"),
    ),
}
"""What tests reach by a private name, and penstock has under the same one: without it they mix the two."""

_STATE = {
    (f"{_ROOT}._src.serialization.type_handler_registry", "GLOBAL_TYPE_HANDLER_REGISTRY"): (
        "penstock.orbax.type_handlers",
        "_PROCESS_WIDE",
    ),
    (f"{_V1}.handlers.registration", "_GLOBAL_REGISTRY"): (
        "penstock.orbax.v1.handler_registration",
        "_GLOBAL_REGISTRY",
    ),
}
"""The registries of the process: a test that copies or replaces Orbax's means the one that it runs with."""

_HELPERS = ("test_utils", "_test_utils", "_test_base", "_test")


def _public_pairs(
    theirs: ModuleType, ours: ModuleType, seen: set[tuple[str, str]]
) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Walk the modules that both libraries show."""
    pair = theirs.__name__, ours.__name__  # one module of penstock stands for several of Orbax
    if pair in seen:
        return

    seen.add(pair)
    yield theirs, ours
    for name in getattr(ours, "__all__", ()):
        inner, other = getattr(ours, name), getattr(theirs, name, None)
        if isinstance(inner, ModuleType) and isinstance(other, ModuleType):
            yield from _public_pairs(other, inner, seen)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class Substitution:
    """Which object of Orbax is replaced by which of penstock.

    Args:
        source: The folder that holds the package `orbax` of the tests.
        active: False to replace nothing, so that the tests run against Orbax itself.
    """

    def __init__(self, source: Path, *, active: bool) -> None:
        self.source = source
        self.replaced: dict[int, Any] = {}
        self.restored: dict[int, Any] = {}
        self.by_name: dict[tuple[str, str], Any] = {}
        self.used: set[str] = set()
        self._views: dict[str, View] = {}
        self._helpers: dict[str, ModuleType] = {}
        self._kept: list[Any] = []
        if active:
            self._pair_up()

    def _pair_up(self) -> None:
        seen: set[tuple[str, str]] = set()
        for theirs, ours in _FACES:
            pairs = _public_pairs(importlib.import_module(theirs), importlib.import_module(ours), seen)
            for module, other in pairs:
                for name in getattr(other, "__all__", ()):
                    self._pair(module, name, getattr(other, name))

        for private, (own, names) in _ALSO.items():
            for name in names:
                ours = getattr(importlib.import_module(own), name)
                self._pair(importlib.import_module(private), name, ours)

    def _pair(self, module: ModuleType, name: str, ours: Any) -> None:
        if isinstance(ours, ModuleType) or module.__name__.endswith("test_utils"):
            return

        self.by_name[module.__name__, name] = ours
        theirs = getattr(module, name, None)
        if str(getattr(theirs, "__module__", "")).startswith(_ROOT) and callable(theirs):
            self._kept.append(theirs)
            self.replaced.setdefault(id(theirs), ours)
            self.restored.setdefault(id(ours), theirs)

    def imported(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002, the names of the built-in function
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Import as the built-in function does, and return a view of what is Orbax's."""
        if level or not (name == "orbax" or name.startswith(f"{_ROOT}.") or name == _ROOT):
            return builtins.__import__(name, globals, locals, fromlist or (), level)

        view = self.view(name)
        if fromlist:
            for inner in fromlist:
                self._load(f"{name}.{inner}")
            return view
        return self.view("orbax")

    def view(self, name: str) -> Any:
        """Return what a test file sees as the module of this name."""
        helper = self._helper(name)
        if helper is not None:
            return helper

        module = importlib.import_module(name)
        if name not in self._views:
            self._views[name] = View(self, module)
        return self._views[name]

    def _load(self, name: str) -> None:
        """Import a module, if there is one of that name; it may be an attribute instead."""
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            self._helper(name)

    def _helper(self, name: str) -> ModuleType | None:
        """Return a helper of the tests, run from the source with the same substitution."""
        if not name.endswith(_HELPERS) and not (name.startswith(f"{_ROOT}.") and ".testing." in name):
            return None

        if name not in self._helpers:
            path = self.source.joinpath(*name.split(".")).with_suffix(".py")
            if not path.exists():
                return None
            self._helpers[name] = self.run(path, name)
        return self._helpers[name]

    def helpers(self) -> list[ModuleType]:
        """Return the helpers of the tests that were run so far."""
        return list(self._helpers.values())

    def run(self, path: Path, name: str) -> ModuleType:
        """Run a file of the tests, and return it as a module."""
        # Helpers are in Orbax's wheel, too, and test files are not.
        module = ModuleType(f"substituted.{name}" if name in sys.modules or _is_installed(name) else name)
        module.__file__ = str(path)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self.imported}
        sys.modules[module.__name__] = module
        self._helpers[name] = module
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        return module

    def holder(self, module: ModuleType, name: str) -> tuple[ModuleType, str]:
        """Return where an attribute of a module is kept: there, or in penstock under another name."""
        if not self.replaced or (module.__name__, name) not in _STATE:
            return module, name

        own, attribute = _STATE[module.__name__, name]
        return importlib.import_module(own), attribute

    def given(self, module: ModuleType, name: str) -> Any:
        """Return what a view of this module shows under a name.

        Raises:
            AttributeError: If Orbax has no such name.
        """
        holder, attribute = self.holder(module, name)
        if holder is not module:
            return getattr(holder, attribute)

        if (module.__name__, name) in self.by_name:
            self.used.add(name)
            return self.by_name[module.__name__, name]

        helper = self._helper(f"{module.__name__}.{name}") if module.__name__.startswith("orbax") else None
        if helper is not None:
            return helper

        value = getattr(module, name)
        if isinstance(value, ModuleType) and value.__name__.startswith("orbax"):
            return self.view(value.__name__)
        if id(value) in self.replaced:
            self.used.add(name)
            return self.replaced[id(value)]
        return value


class View(ModuleType):
    """A module of Orbax as a test file sees it; to set an attribute sets Orbax's own."""

    def __init__(self, substitution: Substitution, module: ModuleType) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__["_substitution"] = substitution
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_substitution"].given(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        substitution = self.__dict__["_substitution"]
        module, name = substitution.holder(self.__dict__["_module"], name)
        is_ours = module is not self.__dict__["_module"]
        setattr(module, name, value if is_ours else substitution.restored.get(id(value), value))

    def __delattr__(self, name: str) -> None:
        module, name = self.__dict__["_substitution"].holder(self.__dict__["_module"], name)
        delattr(module, name)
