"""`[store.s3]`: how buckets are used."""

from __future__ import annotations

__all__ = ("BucketOptions",)

from dataclasses import dataclass, field
from typing import Final, Literal, final

_MIB: Final = 2**20


@final
@dataclass(frozen=True, slots=True)
class BucketOptions:
    """Where a kind of bucket is, and what one request may take. Credentials are not among them.

    What is None is taken from the environment: `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, `AWS_REGION` or
    `AWS_DEFAULT_REGION`. Credentials always are, as `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or come
    from the machine's role.

    Attributes:
        endpoint: The URL of the server; for S3, None is Amazon.
        region: Its region.
        concurrency: Requests of one save, and of one restore, that are under way at once. The option
            `concurrency` of the stages `write` and `read` comes first.
        file_bytes: The length of a data file. Each is one object, put by one request; it is held in memory
            until then.
        request_s: How long one request may take, in seconds.
        connect_s: How long connecting may take, in seconds.
        retries: How many times a request is sent again after an answer such as 503, or none.
        retry_s: How long one request and its repetitions may take together, in seconds.
        checksum: What the server compares uploads with. Not every server knows `crc64nvme`.
        virtual_host: Whether the bucket is part of the host name; None: of Amazon's, not of an endpoint's.
    """

    endpoint: str | None = None
    region: str | None = None
    concurrency: int = field(default=8, metadata={"positive": True})
    file_bytes: int = field(default=16 * _MIB, metadata={"positive": True})
    request_s: float = field(default=60.0, metadata={"positive": True})
    connect_s: float = field(default=5.0, metadata={"positive": True})
    retries: int = 8
    retry_s: float = field(default=120.0, metadata={"positive": True})
    checksum: Literal["crc64nvme", "sha256", "none"] = "crc64nvme"
    virtual_host: bool | None = None
