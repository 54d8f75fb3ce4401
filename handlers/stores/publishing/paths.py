"""Turns what callers pass as a path into an absolute path or a URL."""

from __future__ import annotations

__all__ = (
    "KEEPER_HOST",
    "OF_PROCESSES",
    "TEMPORARY_SUFFIX",
    "absolute_path",
    "inside_of_process",
    "is_scheme",
    "is_whole_bucket",
    "path_or_url",
    "path_to_save_to",
    "root_of",
    "scheme_of",
    "temporary_path",
)

import os
import re
from typing import Final, cast
from urllib.parse import unquote

from penstock.kernel.errors import PathError
from penstock.kernel.registry import SCHEMES

_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(//(?P<host>[^/]*))?(?P<path>/.*)", re.DOTALL)

TEMPORARY_SUFFIX: Final = ".orbax-checkpoint-tmp"
"""In the name of a directory in which a checkpoint is being built, or was when the save was interrupted.

Orbax's, so that its tools know such a directory, too.
"""

KEEPER_HOST: Final = "localhost"
"""The host of `keeper:///run`, which names none. As of a file, `keeper://localhost/run` is the same."""

OF_PROCESSES: Final = f"keeper://{KEEPER_HOST}/process"
"""In a keeper: a directory for each process of a job on this host, by its index, for what it alone has."""

_SETTING: Final = "has a {} in it; options and credentials come from the configuration and the environment"


def temporary_path(path: str) -> str:
    """Return the path where the checkpoint `path` is built before it is published.

    Raises:
        PathError: If `path` itself is named like an interrupted save, which no reader would open.
    """
    if TEMPORARY_SUFFIX in os.path.basename(path):
        raise PathError(path, f"has {TEMPORARY_SUFFIX!r} in its name, which marks an interrupted save")

    return path + TEMPORARY_SUFFIX


def is_scheme(name: str) -> bool:
    """True if there are stores of that scheme. Imports none; blocking for a name that is not penstock's."""
    return name in SCHEMES.own or (name not in ("", "file") and name in SCHEMES.names())


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL that `path_or_url` returned; None for a local path."""
    scheme, separator, _ = path.partition("://")
    return scheme if separator and not path.startswith("/") else None


def root_of(url: str) -> str:
    """Return the URL of the bucket that a URL leads into. One store is opened for all that is in it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.split('/', 1)[0]}"


def inside_of_process(path: str) -> str | None:
    """Return what follows the directory of one process, `OF_PROCESSES`, in a path; None if it is in none."""
    if not path.startswith(f"{OF_PROCESSES}/"):
        return None

    return path[len(OF_PROCESSES) + 1 :].partition("/")[2]


def is_whole_bucket(path: str) -> bool:
    """True if what `path_or_url` returned names a bucket alone, which is in nothing."""
    return not path.startswith("/") and path == root_of(path)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute local path that `path` names: relative, with `~`, or a `file://` URL.

    Raises:
        PathError: If it is empty, not text, has a NUL in it, or names another kind of store.
    """
    found = path_or_url(path)
    if scheme_of(found) is not None:
        raise PathError(found, "is in a bucket; here only local paths are supported yet")

    return found


def path_to_save_to(path: str | os.PathLike[str]) -> str:
    """Return what `path_or_url` does, for a new checkpoint.

    Raises:
        PathError: As `path_or_url`; and if it is a bucket, which holds what says who saves next to it.
    """
    found = path_or_url(path)
    if is_whole_bucket(found):
        raise PathError(found, f"is a whole bucket; name a place in it, as in {found}/run")

    return found


def path_or_url(path: str | os.PathLike[str]) -> str:
    """Return the absolute local path, as `absolute_path`, or the URL that `path` names in a bucket.

    pathlib's `s3:/bucket/run` is taken for `s3://bucket/run`.

    Raises:
        PathError: If it is empty, not text, has a NUL in it, or names another kind of store. If a URL names
            no bucket, or has a query or a user in it.
    """
    text = cast("object", os.fspath(path))  # the caller may have passed bytes all the same
    if not isinstance(text, str):
        raise PathError(repr(path), "is not text")
    if not text.strip():
        raise PathError(text, "is empty; it must name a directory")
    if "\0" in text:
        raise PathError(text, "has a NUL character in it")

    url = _URL.match(text)
    if url is not None and is_scheme(url["scheme"]):
        return _in_bucket(text, url["scheme"])
    if url is not None:
        # pathlib makes `gs:/bucket` of `gs://bucket`, which must not become a folder called `gs:`.
        if url["scheme"] != "file" or (url["host"] or "") not in {"", "localhost"}:
            *others, last = [f"{name}://" for name in SCHEMES.names()]
            known = f"{', '.join(others)} and {last}"
            problem = f"names a {url['scheme']}:// store; local paths, {known} are supported"
            raise PathError(_without_secrets(text), problem)

        text = unquote(url["path"])

    return os.path.abspath(os.path.expanduser(text))


def _in_bucket(text: str, scheme: str) -> str:
    """Return the URL without empty parts and dots.

    Raises:
        PathError: If it names no bucket, leads out of it, or says more than a name.
    """
    rest = text[len(scheme) + 1 :]
    if scheme == "keeper" and (not rest.startswith("//") or rest.startswith("///")):
        # pathlib makes `keeper:/run` of `keeper:///run`, and `keeper:/localhost/run` of what we return.
        inner = rest.lstrip("/")
        rest = f"//{inner}" if inner.partition("/")[0] == KEEPER_HOST else f"//{KEEPER_HOST}/{inner}"

    bucket, *names = [name for name in rest.split("/") if name not in {"", "."}] or [""]
    if not bucket or rest.startswith("///"):
        raise PathError(text, f"names no bucket, as in {scheme}://bucket/run")
    if ".." in (bucket, *names):
        raise PathError(text, "has '..' in it, which means nothing in a bucket")
    for sign in "@?#":
        if sign in bucket or (sign != "@" and sign in text):
            raise PathError(_without_secrets(text), _SETTING.format(repr(sign)))

    return "/".join((f"{scheme}://{bucket}", *names))


def _without_secrets(text: str) -> str:
    """Return a URL as far as it can be shown: neither a password nor a query."""
    before, at, after = text.partition("@")
    shown = f"{before.split('://')[0]}://...@{after}" if at else text
    return re.split(r"[?#]", shown)[0]
