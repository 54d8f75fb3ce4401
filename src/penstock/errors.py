"""Every error that penstock raises on purpose; docs/reference/errors.md has the table."""

from __future__ import annotations

from penstock.kernel import errors as _errors
from penstock.kernel.errors import *  # noqa: F403  # the list is there, once

__all__: list[str] = []
__all__ += _errors.__all__
