"""Orbax and penstock in one program: penstock's names in Orbax's place, and Orbax's classes in ours."""

from __future__ import annotations

__all__ = ("Counterpart", "Installation", "OrbaxInUseError", "install", "loaded_orbax", "stand_for")

import sys
from abc import ABCMeta
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Final, Self, final

from penstock import kernel
from penstock.errors import PenstockError
from penstock.orbax.private_modules import private_module

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
        sys.meta_path.insert(0, self)
        for name in _PRIVATE_PACKAGES:  # importing sets the attribute of what stands for their parent
            import_module(f"{ORBAX}.{name}")

    def remove(self) -> None:
        """Undo that."""
        if self not in sys.meta_path:
            return

        sys.meta_path.remove(self)
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


def _ours(name: str) -> ModuleType | None:
    """Return penstock's module for one of Orbax; None if there is none."""
    private = private_module(ORBAX, name.removeprefix(f"{ORBAX}."))
    if private is not None:
        return private

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
