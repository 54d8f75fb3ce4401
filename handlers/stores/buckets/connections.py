"""Connects to buckets: what obstore is given, from the options and else from the environment."""

from __future__ import annotations

__all__ = ("Connection", "connect", "tensorstore_spec")

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, final

from penstock.handlers.stores.buckets.bucket_options import AzOptions, BucketOptions, GsOptions, S3Options
from penstock.handlers.stores.buckets.retries import RetryPolicy
from penstock.kernel.errors import ConfigError

_S3_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_KEYS: Final = ("AWS_ACCESS_KEY_ID",)
_GS_ENDPOINTS: Final = ("GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST")
_AZ_ENDPOINTS: Final = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_ACCOUNTS: Final = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")


_MANY: Final = 1000
"""Repetitions by obstore itself, which counts them, too. It is time that bounds them."""


@final
@dataclass(frozen=True, slots=True)
class Connection:
    """The maker of obstore's clients of a bucket, given the module `obstore.store`."""

    make: Callable[[Any, Mapping[str, Any]], Any]  #: given how requests are repeated, too
    policy: RetryPolicy  #: how long users of the client repeat requests

    def __call__(self, stores: Any) -> Any:
        """Return the client that repeats nothing."""
        return self.make(stores, {"max_retries": 0, "retry_timeout": timedelta(seconds=self.policy.total_s)})

    def patient(self, stores: Any) -> Any:
        """Return the client that repeats each request by itself, where many are one call."""
        policy = self.policy
        return self.make(
            stores,
            {
                "max_retries": _MANY if policy.most is None else policy.most,
                "retry_timeout": timedelta(seconds=policy.total_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=policy.first_s),
                    "max_backoff": timedelta(seconds=policy.longest_s),
                    "base": 2,
                },
            },
        )


def connect(
    bucket: str, options: BucketOptions, prefix: str | None = None, environ: Mapping[str, str] | None = None
) -> Connection:
    """Return what makes obstore's clients of a bucket.

    obstore looks for credentials where each provider's own tools do. None passes through here.

    Args:
        bucket: Its name.
        options: Where it is and how it is asked. Their class says whose it is.
        prefix: What all keys begin with; for tests that share a bucket.
        environ: Instead of the process's environment, for what `options` leave open.

    Raises:
        ConfigError: If the name of the storage account is not known.
    """
    variables = os.environ if environ is None else environ
    match options:
        case S3Options():
            kind, endpoint, config, headers = _s3(options, variables)
        case GsOptions():
            kind, endpoint, config, headers = _gs(options, variables)
        case AzOptions():
            kind, endpoint, config, headers = _az(options, variables)
        case _:
            raise TypeError(f"{type(options).__name__} are no bucket's options")

    def make(stores: Any, retries: Mapping[str, Any]) -> Any:
        return getattr(stores, kind)(
            bucket,
            prefix=prefix,
            config={name: value for name, value in config.items() if value is not None},
            client_options=_client_options(options, endpoint, headers),
            retry_config=retries,
        )

    return Connection(make, RetryPolicy(options.retry_s, options.retries))


def tensorstore_spec(
    bucket: str, options: BucketOptions, environ: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return what TensorStore opens a bucket by, without a path; None if it has no driver for it.

    TensorStore finds credentials by itself, too. For Google, it takes another endpoint from
    `TENSORSTORE_GCS_HTTP_URL` alone.

    Args:
        bucket: Its name.
        options: Where it is.
        environ: As for `connect`.
    """
    variables = os.environ if environ is None else environ
    if isinstance(options, GsOptions):
        return {"driver": "gcs", "bucket": bucket}
    if not isinstance(options, S3Options):
        return None

    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket}
    endpoint = options.endpoint or _first(variables, _S3_ENDPOINTS)
    region = options.region or _first(variables, _REGIONS)
    if endpoint is not None:
        spec["endpoint"] = endpoint
    if region is not None:
        spec["aws_region"] = region
    if _first(variables, _KEYS) is not None:
        spec["aws_credentials"] = {"type": "environment"}

    return spec


_Told = tuple[str, str | None, dict[str, Any], dict[str, str]]
"""obstore's class, the endpoint, the configuration, and the headers of each request."""


def _s3(options: S3Options, variables: Mapping[str, str]) -> _Told:
    endpoint = options.endpoint or _first(variables, _S3_ENDPOINTS)
    is_signed = _is_plain(endpoint)  # over TLS the payload need not be: that takes most of an upload's time
    by_itself = "sha256" if is_signed else "crc64nvme"  # the signature has a sha256 of the payload in it
    config = {
        "endpoint": endpoint,
        "region": options.region or _first(variables, _REGIONS),
        "virtual_hosted_style_request": endpoint is None
        if options.virtual_host is None
        else options.virtual_host,
        "unsigned_payload": not is_signed,
        "checksum_algorithm": {"auto": by_itself, "none": None}.get(options.checksum, options.checksum),
        "request_payer": True if options.requester_pays else None,
        "copy_if_not_exists": "multipart",  # a copy has no condition there, and the end of an upload has
    }
    return "S3Store", endpoint, config, {}


def _gs(options: GsOptions, variables: Mapping[str, str]) -> _Told:
    endpoint = options.endpoint or _first(variables, _GS_ENDPOINTS)
    if endpoint is not None and "://" not in endpoint:  # what Google's own libraries accept
        endpoint = f"http://{endpoint}"

    config = {
        "base_url": endpoint,
        # A token must not go over an open line. Without any, obstore would ask the machine for one.
        "bearer_token": "none" if _is_plain(endpoint) else None,
    }
    headers = {} if options.billed_project is None else {"x-goog-user-project": options.billed_project}
    return "GCSStore", endpoint, config, headers


def _az(options: AzOptions, variables: Mapping[str, str]) -> _Told:
    endpoint = options.endpoint or _first(variables, _AZ_ENDPOINTS)
    account = options.account or _first(variables, _ACCOUNTS)
    if account is None:
        raise ConfigError("store.az.account", "is not known: set it, or " + _ACCOUNTS[0], "environment")

    return "AzureStore", endpoint, {"endpoint": endpoint, "account_name": account}, {}


def _client_options(
    options: BucketOptions, endpoint: str | None, headers: Mapping[str, str]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "allow_http": _is_plain(endpoint),
        "timeout": timedelta(seconds=options.request_s),
        "read_timeout": timedelta(seconds=options.progress_s),
        "connect_timeout": timedelta(seconds=options.connect_s),
    }
    if headers:
        found["default_headers"] = dict(headers)

    return found


def _is_plain(endpoint: str | None) -> bool:
    return endpoint is not None and endpoint.startswith("http://")


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((variables[name] for name in names if variables.get(name)), None)
