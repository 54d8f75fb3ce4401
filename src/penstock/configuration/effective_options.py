"""What holds now: every option with its value and where that came from."""

from __future__ import annotations

__all__ = ("EffectiveOption", "effective_options", "masked")

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.configuration.option_reference import as_toml, every_option
from penstock.kernel.config.config import Config, given_layers
from penstock.kernel.config.option_layers import TABLES, Given, given_leaves

_SECRET: Final = re.compile(
    r"(?:^|_)(?:secret|password|passphrase|token|credentials?|private)(?:_|$)|(?:^|_)key$", re.IGNORECASE
)

_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY: Final = re.compile(r"(?<=[?&])([\w-]*(?:sig|key|token|secret)[\w-]*)=[^&\s\x22]+", re.IGNORECASE)
_HIDDEN: Final = "********"


@final
@dataclass(frozen=True, slots=True)
class EffectiveOption:
    """One option as it is."""

    key: str
    value: str  #: as TOML writes it; secrets are masked
    source: str  #: `default`, a file, an environment variable or `argument`


def effective_options(
    path: str | os.PathLike[str] | None = None,
    *,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[EffectiveOption]:
    """Return every option, as `Config.load` would find it. Blocking.

    Raises:
        ConfigError: What `Config.load` raises.
    """
    table = given_layers(path, profile=profile, environ=environ)
    config = Config.load(path, profile=profile, environ=environ)
    sources = {key: given.source for key, given in given_leaves(table)}
    values = dict(_values(config, ""))
    shown: list[EffectiveOption] = []
    for entry in every_option():
        value = values.pop(entry.key, ...)
        text = entry.default if value is ... else as_toml(value, entry.unit)
        shown.append(EffectiveOption(entry.key, masked(entry.key, text), sources.get(entry.key, "default")))

    # What is left are options of stages that are not penstock's own.
    shown += [
        EffectiveOption(key, masked(key, as_toml(value)), sources.get(key, "default"))
        for key, value in values.items()
    ]
    return shown


def masked(key: str, value: str) -> str:
    """Return a value without what should not be seen: that of a secret, and passwords in URLs."""
    if _SECRET.search(key.rpartition(".")[2]) and value != "(none)":
        return _HIDDEN

    return _QUERY.sub(rf"\1={_HIDDEN}", _IN_URL.sub(f"{_HIDDEN}@", value))


def _values(options: Any, section: str) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        key = f"{section}.{field.name}".strip(".")
        if TABLES in field.metadata:
            yield from ((f"{section}.{at}", given.value) for at, given in _given(value, ""))
        elif dataclasses.is_dataclass(value):
            yield from _values(value, key)
        else:
            yield key, value


def _given(table: Mapping[str, Any], section: str) -> Iterator[tuple[str, Given]]:
    for name, given in table.items():
        key = f"{section}.{name}".strip(".")
        if isinstance(given, Given):
            yield key, given
        else:
            yield from _given(given, key)
