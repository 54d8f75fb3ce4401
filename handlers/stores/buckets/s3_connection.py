"""Connects to a bucket of Amazon S3, or of a server that speaks its protocol."""

from __future__ import annotations

__all__ = ("connect_s3",)

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from penstock.kernel.config.bucket_options import BucketOptions

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_FIRST_WAIT: Final = timedelta(milliseconds=100)
_LONGEST_WAIT: Final = timedelta(seconds=5)


def connect_s3(
    bucket: str, options: BucketOptions, prefix: str | None = None, environ: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Return what makes obstore's client, given the module `obstore.store`.

    obstore looks for credentials in the environment, a web identity and the machine's role. None passes
    through here.

    Args:
        bucket: Its name.
        options: Where it is and how it is asked.
        prefix: What all keys begin with; for tests that share a bucket.
        environ: Instead of the process's environment, for what `options` leave open.
    """
    variables = os.environ if environ is None else environ
    endpoint = options.endpoint or _first(variables, _ENDPOINTS)
    is_plain = endpoint is not None and endpoint.startswith("http://")
    virtual_host = endpoint is None if options.virtual_host is None else options.virtual_host
    config: dict[str, Any] = {
        "endpoint": endpoint,
        "region": options.region or _first(variables, _REGIONS),
        "virtual_hosted_style_request": virtual_host,
        # Over TLS the payload need not be signed: that takes most of an upload's time.
        "unsigned_payload": not is_plain,
        "checksum_algorithm": None if options.checksum == "none" else options.checksum,
    }

    def connect(stores: Any) -> Any:
        return stores.S3Store(
            bucket,
            prefix=prefix,
            config={name: value for name, value in config.items() if value is not None},
            client_options={
                "allow_http": is_plain,
                "timeout": timedelta(seconds=options.request_s),
                "connect_timeout": timedelta(seconds=options.connect_s),
            },
            retry_config={
                "max_retries": options.retries,
                "retry_timeout": timedelta(seconds=options.retry_s),
                "backoff": {"init_backoff": _FIRST_WAIT, "max_backoff": _LONGEST_WAIT, "base": 2},
            },
        )

    return connect


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((variables[name] for name in names if variables.get(name)), None)
