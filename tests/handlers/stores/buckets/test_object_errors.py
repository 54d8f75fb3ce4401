"""Each kind of answer is an error of the family that says what to do about it."""

from __future__ import annotations

import errno

import pytest

from penstock.errors import AccessDeniedError, StorageError, ThrottledError, UnreachableError
from penstock.handlers.stores.buckets.object_errors import failure, translated

STATUS = (
    "Generic S3 error: Error performing PUT http://127.0.0.1/b/k in 1ms - Server returned non-2xx status code"
)
RETRIED = (
    "Generic S3 error: Error performing PUT http://h/b/k in 9.1s, after 8 retries, max_retries: 8 - HTTP"
)


@pytest.mark.parametrize(
    ("kind", "said", "expected", "number"),
    [
        ("AlreadyExistsError", "Object at location a already exists", StorageError, errno.EEXIST),
        ("PreconditionError", "Request precondition failure", StorageError, errno.ESTALE),
        ("NotSupportedError", "no", StorageError, errno.ENOTSUP),
        ("PermissionDeniedError", f"{STATUS}: 403 Forbidden", AccessDeniedError, errno.EACCES),
        ("UnauthenticatedError", f"{STATUS}: 401 Unauthorized", AccessDeniedError, errno.EACCES),
        (
            "GenericError",
            f"{STATUS}: 400 Bad Request: <Code>ExpiredToken</Code>",
            AccessDeniedError,
            errno.EACCES,
        ),
        (
            "GenericError",
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest - error sending",
            AccessDeniedError,
            errno.EACCES,
        ),
        ("GenericError", f"{STATUS}: 503 Service Unavailable", ThrottledError, errno.EAGAIN),
        ("GenericError", f"{STATUS}: 429 Too Many Requests", ThrottledError, errno.EAGAIN),
        ("GenericError", f"{STATUS}: 200 OK: <Code>SlowDown</Code>", ThrottledError, errno.EAGAIN),
        ("GenericError", f"{STATUS}: 404 Not Found: <Code>NoSuchBucket</Code>", StorageError, errno.ENOENT),
        ("GenericError", f"{STATUS}: 418 I'm a teapot: connection", StorageError, errno.EIO),
        ("GenericError", f"{RETRIED} error: error sending request", UnreachableError, errno.EHOSTUNREACH),
        ("GenericError", "Generic S3 error: operation timed out", UnreachableError, errno.EHOSTUNREACH),
        (
            "GenericError",
            "Generic S3 error: Error getting list response body: HTTP error: request or response body error",
            UnreachableError,
            errno.EHOSTUNREACH,
        ),
        (
            "GenericError",
            f"Error performing GET http://169.254.169.254/a{STATUS[-48:]}: 503 Service Unavailable",
            ThrottledError,
            errno.EAGAIN,
        ),
        ("GenericError", "Generic S3 error: what is this", StorageError, errno.EIO),
    ],
)
def test_each_answer_is_of_its_family(
    kind: str, said: str, expected: type[StorageError], number: int
) -> None:
    error = failure("put", "s3://b/k", kind, said)
    assert type(error) is expected
    assert (error.operation, error.path, error.errno) == ("put", "s3://b/k", number)
    assert "s3://b/k" in str(error)


def test_families_are_pythons_too() -> None:
    assert isinstance(failure("put", "p", "PermissionDeniedError", ""), PermissionError)
    assert isinstance(failure("put", "p", "GenericError", "connection refused"), ConnectionError)


def test_what_the_client_dumps_is_left_out() -> None:
    error = failure("put", "p", "GenericError", "short\n\nDebug source:\nGeneric { secret }" + "x" * 5000)
    assert error.problem == "short"
    assert len(str(failure("put", "p", "GenericError", "x" * 5000))) < 400


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), translated("put", "p"):
        raise ZeroDivisionError
    with pytest.raises(StorageError, match="nothing is there") as caught, translated("get", "p"):
        raise FileNotFoundError("Object at location k not found")
    assert caught.value.errno == errno.ENOENT
