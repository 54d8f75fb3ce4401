"""Values in JSON documents that handlers write in turn: `_sharding`, `_strings.json`."""

from __future__ import annotations

__all__ = ("read_values", "sharding_pointer", "write_values")

from base64 import urlsafe_b64encode
from collections.abc import Sequence
from typing import Any

import tensorstore as ts

from penstock.orbax.common.background_work import all_results, in_thread
from penstock.orbax.common.item_files import check_document
from penstock.orbax.common.leaf_args import ParamInfo
from penstock.orbax.v0.leaf_handlers.tensorstore_specs import get_ts_context, json_spec

_ts: Any = ts  # its stubs use names that they do not define


def sharding_pointer(name: str) -> str:
    """The JSON pointer of a leaf's sharding in `_sharding`."""
    return f"/{urlsafe_b64encode(name.encode()).decode()}"


def write_values(file: str, entries: Sequence[tuple[ParamInfo, str, str]]) -> None:
    """Add strings to a document, all of them or none. Blocking.

    Args:
        file: The name of the document.
        entries: Of each leaf, the JSON pointer and the text.
    """
    transaction, context = _ts.Transaction(), get_ts_context(use_ocdbt=False)
    opening = [
        _ts.open(json_spec(str(info.parent_dir), file, pointer), open=True, context=context)
        for info, pointer, _ in entries
    ]
    writing = [
        future.result().with_transaction(transaction).write(text)
        for future, (_, _, text) in zip(opening, entries, strict=True)
    ]
    for future in writing:
        future.result()

    transaction.commit_async().result()


async def read_values(file: str, infos: Sequence[ParamInfo], pointers: Sequence[str]) -> list[Any]:
    """Read a value for each leaf.

    Raises:
        ValueError: If the document or a value is missing.
        ChecksumError: If the document is not as it was written.
    """
    for directory in {str(info.parent_dir) for info in infos}:
        await in_thread(check_document, directory, file)

    context = get_ts_context(use_ocdbt=False)
    opening = [
        _ts.open(json_spec(str(info.parent_dir), file, pointer), open=True, read=True, context=context)
        for info, pointer in zip(infos, pointers, strict=True)
    ]
    opened = await all_results(opening, infos)
    return [value.item() for value in await all_results([store.read() for store in opened], infos)]
