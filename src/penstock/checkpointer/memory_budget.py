"""The memory budget of a Checkpointer: from its arguments, from its configuration, or shared."""

from __future__ import annotations

__all__ = ("MemoryKeywords", "config_and_regulator")

import os
from typing import TypedDict, cast

from penstock.kernel.config.config import Config
from penstock.kernel.errors import ConfigError
from penstock.kernel.memory.regulator import MemoryRegulator


class MemoryKeywords(TypedDict, total=False):
    """Keyword arguments of `Checkpointer` that bound memory; each overrides the config.

    Each takes a number of bytes, or a text such as `"2GiB"`. Names of Orbax's mean what they mean there.

    Attributes:
        memory_limit: Host bytes that all saves and restores together may hold, or `"auto"`.
        save_device_host_concurrent_bytes: Of these, how many saves may hold staged; by default all.
        save_concurrent_bytes: Bytes that may be on their way to storage at once.
        restore_concurrent_bytes: Bytes that may be on their way from storage at once.
        memory: The budget of another Checkpointer, to share it; instead of all the others.
    """

    memory_limit: int | str | None
    save_device_host_concurrent_bytes: int | str | None
    save_concurrent_bytes: int | str | None
    restore_concurrent_bytes: int | str | None
    memory: MemoryRegulator | None


def config_and_regulator(
    config: Config | str | os.PathLike[str] | None, keywords: MemoryKeywords, profile: str | None = None
) -> tuple[Config, MemoryRegulator]:
    """Return the options, overridden by the keywords, and the budget that they describe.

    Raises:
        ConfigError: If an option is unknown or does not fit, or one is given together with `memory`.
    """
    given = {name: value for name, value in keywords.items() if value is not None}
    memory = cast("MemoryRegulator | None", given.pop("memory", None))
    if memory is not None and given:
        raise ConfigError(f"memory.{next(iter(given))}", "cannot be combined with `memory`")
    if "memory_limit" in given:
        given = {"limit_bytes": given.pop("memory_limit"), **given}

    if isinstance(config, Config):
        if profile is not None:
            raise ConfigError("profile", "cannot be combined with a Config, which has been loaded already")

        options = config
    else:
        options = Config.load(config, profile=profile)

    options = options.changed({"memory": given}) if given else options
    return options, _regulator(options) if memory is None else memory


def _regulator(options: Config) -> MemoryRegulator:
    memory = options.memory
    return MemoryRegulator(
        memory.limit_bytes,
        save_device_host_concurrent_bytes=memory.save_device_host_concurrent_bytes,
        save_concurrent_bytes=memory.save_concurrent_bytes,
        restore_concurrent_bytes=memory.restore_concurrent_bytes,
    )
