"""Public names that are imported on first use, so that importing a package is cheap.

A package lists its names twice: as imports under `TYPE_CHECKING`, which checkers and editors read, and as a
table in the `else` branch, which the interpreter reads. The branch matters: a checker that saw
`__getattr__` would accept every misspelt name.
"""

from __future__ import annotations

__all__ = ("lazy_names",)

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package whose names are imported on first use.

    Args:
        package: Its name, `__name__` there.
        homes: Module -> the names taken from it. The names under the package itself are its submodules.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> object:
        home = home_of.get(name)
        if home is None:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[package])

        value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        vars(sys.modules[package])[name] = value  # found without this function from now on
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return get, names
