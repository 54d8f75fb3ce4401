"""Translates the errors of obstore into those of penstock. Here only."""

from __future__ import annotations

__all__ = ("NO_BUCKET", "WITHIN_SUCCESS", "failure", "is_lasting", "translated")

import errno
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from penstock.kernel.errors import AccessDeniedError, StorageError, ThrottledError, UnreachableError

_DENIED: Final = frozenset({"PermissionDeniedError", "UnauthenticatedError"})
_EXISTS: Final = frozenset({"AlreadyExistsError"})
_NUMBERS: Final = {
    "InvalidPathError": errno.EINVAL,
    "NotSupportedError": errno.ENOTSUP,
    "PreconditionError": errno.ESTALE,
}
_STATUS: Final = re.compile(r"\b(?:status(?: code)?:? |HTTP/1\.1 )(\d{3})\b")
_BUSY: Final = frozenset({429, 500, 502, 503, 504})
_BUSY_CODES: Final = ("SlowDown", "ServerBusy", "TooManyRequests", "InternalError", "ServiceUnavailable")
_DENIED_CODES: Final = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
_NO_BUCKET: Final = ("NoSuchBucket", "specified bucket does not exist", "ContainerNotFound")
_NO_CREDENTIALS: Final = ("169.254.169.254", "metadata.google", "169.254.170.2")
_NO_ANSWER: Final = (
    "error sending request",
    "connect",
    "timed out",
    "timeout",
    "dns error",
    "connection",
    "error decoding response body",
    "request or response body error",
    "got invalid list response",  # its end was lost on the way
)
NO_BUCKET: Final = "there is no such bucket"
WITHIN_SUCCESS: Final = "the reply said success and held an error"
"""As Amazon may answer when an upload in parts is completed. The client asks again for two codes alone."""

_UNTRUSTED: Final = "its certificate is not accepted"
_CERTIFICATES: Final = ("invalid peer certificate", "UnknownIssuer", "certificate verify failed")

_MOST: Final = 300
"""Characters of what the client said that an error repeats."""


@contextmanager
def translated(operation: str, path: str) -> Generator[None]:
    """Turn what the client raises in the block into a `StorageError` about `path`."""
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        said = str(error)
        absent = NO_BUCKET if _has(said, _NO_BUCKET) else "nothing is there"
        raise StorageError(operation, path, absent, errno.ENOENT) from error
    except Exception as error:
        by_writer = type(error) is OSError and error.errno is None
        if not by_writer and not type(error).__module__.startswith("obstore"):
            raise

        raise failure(operation, path, type(error).__name__, str(error)) from error


def is_lasting(error: StorageError) -> bool:
    """True if the same request will fail in the same way however often it is sent. Pure."""
    return error.problem.startswith(_UNTRUSTED)


def failure(operation: str, path: str, kind: str, said: str) -> StorageError:
    """Return the error for what the client raised. Pure.

    Args:
        operation: What was asked for.
        path: Of what.
        kind: The name of the client's class.
        said: Its words. What follows the first part, a dump of its state, is left out.
    """
    words = " ".join(said.split("Debug source:")[0].split())
    message = words if len(words) <= _MOST else f"{words[:_MOST]} ..."
    found = _STATUS.search(words)
    status = int(found[1]) if found else 0
    if _has(words, _NO_BUCKET):
        return StorageError(operation, path, NO_BUCKET, errno.ENOENT)
    if kind in _EXISTS:
        return StorageError(operation, path, "is there already", errno.EEXIST)
    if _has(words, _NO_CREDENTIALS) and status in _BUSY:
        return ThrottledError(operation, path, f"the service of credentials is busy: {message}")
    if _has(words, _NO_CREDENTIALS):
        return AccessDeniedError(operation, path, f"no credentials were found: {message}")
    if kind in _DENIED or status in (401, 403) or _has(words, _DENIED_CODES):
        return AccessDeniedError(operation, path, message)
    if "Got invalid multipart response" in words:
        return ThrottledError(operation, path, WITHIN_SUCCESS)
    if status in _BUSY or _has(words, _BUSY_CODES):
        return ThrottledError(operation, path, message)
    if kind in _NUMBERS:
        return StorageError(operation, path, message, _NUMBERS[kind])
    if not status and _has(said, _CERTIFICATES):
        return UnreachableError(operation, path, f"{_UNTRUSTED}: {message}")
    if not status and _has(words.lower(), _NO_ANSWER):
        return UnreachableError(operation, path, message)

    return StorageError(operation, path, message, errno.EIO)


def _has(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)
