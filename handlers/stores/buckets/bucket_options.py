"""`[store.s3]`, `[store.gs]` and `[store.az]`: how buckets are used."""

from __future__ import annotations

__all__ = ("AzOptions", "BucketOptions", "GsOptions", "S3Options")

from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, final

from penstock.kernel.options import fit_fields

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """The server of buckets of one kind, and the limits of one request.

    Credentials are not among the options. They come from the environment, or from the machine's role.

    Attributes:
        endpoint: The URL of the server; None for what the environment says, else the provider's own.
        concurrency: Requests of one save, and of one restore, that are under way at once. The option
            `concurrency` of the stages `write` and `read` comes first.
        file_bytes: The length of a data file. Each is one object, put by one request; it is held in memory
            until then.
        request_s: How long one request may take, in seconds.
        progress_s: How long a reply may bring nothing new, in seconds.
        connect_s: How long connecting may take, in seconds.
        retries: How many times a request is sent again after an answer such as 503, or none; None for as
            often as there is time for.
        retry_s: How long one request and its repetitions may take together, in seconds.
        single_writer: Says that no other process saves to the same paths meanwhile. Then a server that
            ignores conditions is used all the same, and nothing keeps two savers apart there.
        lease_s: How long a claim of this process lasts that is not renewed, in seconds, as when the process
            is killed or stopped. Then another one may take it over. It is renewed three times as often.
    """

    endpoint: str | None = None
    concurrency: int = field(default=8, metadata={"positive": True})
    file_bytes: int = field(default=16 * _MIB, metadata={"positive": True})
    request_s: float = field(default=60.0, metadata={"positive": True})
    progress_s: float = field(default=20.0, metadata={"positive": True})
    connect_s: float = field(default=5.0, metadata={"positive": True})
    retries: int | None = None
    retry_s: float = field(default=120.0, metadata={"positive": True})
    single_writer: bool = False
    lease_s: float = field(default=90.0, metadata={"positive": True})
    section: ClassVar[str] = "store"

    def __post_init__(self) -> None:
        fit_fields(self, self.section)


@final
@dataclass(frozen=True, slots=True)
class S3Options(BucketOptions):
    """`[store.s3]`: Amazon S3, and servers that speak its protocol.

    The endpoint that is None is `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`. Credentials are
    `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, a web identity or the machine's role.

    Attributes:
        region: Of the bucket; None for `AWS_REGION` or `AWS_DEFAULT_REGION`.
        checksum: What the server compares uploads with. "auto": `sha256` where that is computed anyway, since
            a request without TLS is signed with its content, and `crc64nvme` elsewhere.
        virtual_host: Whether the bucket is part of the host name; None: of Amazon's, not of an endpoint's.
        requester_pays: Whether the caller pays for requests to another one's bucket.
    """

    region: str | None = None
    checksum: Literal["auto", "crc64nvme", "sha256", "none"] = "auto"
    virtual_host: bool | None = None
    requester_pays: bool = False
    section: ClassVar[str] = "store.s3"


@final
@dataclass(frozen=True, slots=True)
class GsOptions(BucketOptions):
    """`[store.gs]`: Google Cloud Storage.

    The endpoint that is None is `GOOGLE_BASE_URL` or `STORAGE_EMULATOR_HOST`. Credentials are a service
    account, `GOOGLE_APPLICATION_CREDENTIALS` or the machine's own. To an endpoint without TLS, which only an
    emulator has, none are sent.

    Attributes:
        billed_project: The project that pays for requests, where the bucket's owner does not.
    """

    billed_project: str | None = None
    section: ClassVar[str] = "store.gs"


@final
@dataclass(frozen=True, slots=True)
class AzOptions(BucketOptions):
    """`[store.az]`: Azure Blob Storage. What is called a bucket here is a container there.

    The endpoint that is None is `AZURE_STORAGE_ENDPOINT` or `AZURE_ENDPOINT`. Credentials are
    `AZURE_STORAGE_ACCOUNT_KEY`, a service principal, a workload's or the machine's identity.

    Attributes:
        account: The storage account; None for `AZURE_STORAGE_ACCOUNT_NAME`.
    """

    account: str | None = None
    section: ClassVar[str] = "store.az"
