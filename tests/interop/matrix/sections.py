"""All tables, in the order of the page."""

from __future__ import annotations

__all__ = ("SECTIONS",)

from typing import Final

from tests.interop.matrix.by_orbax import WRITTEN_BY_ORBAX
from tests.interop.matrix.by_penstock import WRITTEN_BY_PENSTOCK
from tests.interop.matrix.items import ITEMS_OF_ORBAX, ITEMS_OF_PENSTOCK
from tests.interop.matrix.tensors import SAFETENSORS

SECTIONS: Final = (
    WRITTEN_BY_PENSTOCK,
    ITEMS_OF_PENSTOCK,
    WRITTEN_BY_ORBAX,
    ITEMS_OF_ORBAX,
    SAFETENSORS,
)
