"""Folders as `save_pretrained` of Hugging Face's transformers writes them, byte for byte.

They hold arrays and nothing that only penstock reads: no note of the tree, and no checksums.

Source:
    `PreTrainedModel.save_pretrained` of transformers 5.24, `split_state_dict_into_shards_factory` of
    huggingface_hub 2.4, and the order in which safetensors 0.8 writes tensors.
"""

from __future__ import annotations

__all__ = ("DEFAULT_PRETRAINED_SHARD_BYTES", "PretrainedLayout", "in_natural_order")

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from penstock.handlers.formats.safetensors.header import CODES, MAX_HEADER_BYTES, METADATA
from penstock.handlers.formats.safetensors.safetensors_layout import (
    SINGLE_FILE,
    TensorsLayout,
    check_leaf,
)
from penstock.handlers.formats.safetensors.tensor_paths import INDEX_SUFFIX, SUFFIX, holds_only_tensors
from penstock.handlers.stores.publishing.paths import temporary_path
from penstock.kernel.errors import InvalidLeafError, PathError, SpecError
from penstock.kernel.protocols.layouts import Arrangement, FilePosition, WrittenRange
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document

DEFAULT_PRETRAINED_SHARD_BYTES: Final = 50 * 10**9
"""Of `save_pretrained` since transformers 5; it was a tenth of that before."""

_WIDTHS: Final = {dtype: rank for rank, dtype in enumerate(CODES)}
"""safetensors writes the last of its element types first; the table has them in its order."""

_NUMBER: Final = re.compile("[0-9]{1,18}")

_Tensor: TypeAlias = "tuple[int, str, LeafSpec]"
"""Place in flatten order, name, spec."""


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of their keys, numbers by their value: layer 10 comes after layer 9."""
    return sorted(names, key=_natural)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    # A number sorts before a word, as the layers of a module do before what follows them.
    return [(False, int(key), key) if _NUMBER.fullmatch(key) else (True, 0, key) for key in name.split(".")]


@final
@dataclass(frozen=True, slots=True)
class PretrainedLayout(TensorsLayout):
    """Writes folders that no program can tell from those of `save_pretrained`, and reads any of safetensors.

    Within a file safetensors sorts the tensors, so only where one file ends and another begins depends on
    the order of a model's modules, which names do not tell.

    Args:
        max_shard_bytes: Most bytes of data in a file, before another begins; by default 50 GB.
        order: Names of tensors in the order in which they are dealt to files. All others follow in the order
            of their names, with numbers by value.
        beside: Names of the files that are written next to those of tensors. A folder that has no others may
            be replaced.

    Raises:
        ConfigError: If `max_shard_bytes` is not positive, or no number of bytes.
    """

    max_shard_bytes: int | None = field(default=None, metadata={"positive": True})
    order: Sequence[str] = ()
    beside: Sequence[str] = ()

    def temporary_name(self, path: str) -> str:
        """The name of the folder in which the folder `path` is made.

        Raises:
            PathError: If `path` is named like an interrupted save, or like a file.
        """
        if path.endswith(SUFFIX):
            raise PathError(path, "is the name of one file, and transformers writes a folder; name one")

        return temporary_path(path)

    def file_of(self, path: str) -> None:
        """None: it is a folder, also if there is one file."""

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Refuse what is no array that the format has.

        Raises:
            InvalidLeafError: If a leaf is none. The message says what to do.
        """
        for leaf in leaves:
            check_leaf(leaf.info, leaf.spec)
            if leaf.spec.shape is None:
                problem = f"is no array but a {leaf.spec.typestr}, which transformers' files cannot hold"
                raise InvalidLeafError(leaf.info.key_path, f"{problem}; leave it out")
            if leaf.spec.extended_dtype:
                problem = f"is a random key ({leaf.spec.extended_dtype}), which would come back as numbers"
                raise InvalidLeafError(leaf.info.key_path, f"{problem}; leave it out")

    def arrange(
        self,
        path: str,
        infos: Sequence[ParamInfo],
        specs: Sequence[LeafSpec],
        custom_metadata: Mapping[str, Any] | None,
    ) -> Arrangement:
        """Decide where each tensor goes.

        Members of `custom_metadata` become texts of `__metadata__`, those that are no texts as JSON.

        Raises:
            SpecError: If a header would be too long.
        """
        metadata = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in (custom_metadata or {}).items()
        }
        metadata.setdefault("format", "pt")  # without it transformers refuses the file
        numbers = {info.name: number for number, info in enumerate(infos)}
        known = [name for name in self.order if name in numbers]
        names = [*known, *in_natural_order(numbers.keys() - known)]
        most = self.max_shard_bytes or DEFAULT_PRETRAINED_SHARD_BYTES
        shards = _shards([(numbers[name], name, specs[numbers[name]]) for name in names], most)
        files = [
            f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE_FILE
            for number in range(1, len(shards) + 1)
        ]
        places: list[FilePosition | None] = [None] * len(infos)
        heads: list[Document] = []
        for file, shard in zip(files, shards, strict=True):
            head, begins = _head(shard, metadata)
            heads.append(Document(file, head))
            for number, begin in begins.items():
                places[number] = FilePosition(file, len(head) + begin)

        return Arrangement(tuple(heads), tuple(places), _index(files, shards))

    def digests(self, arrangement: Arrangement, specs: Sequence[LeafSpec]) -> WithoutDigests:
        """Return the heads as they were arranged: the format has no checksums."""
        return WithoutDigests({head.path: head.data for head in arrangement.heads})

    def recognises(self, store: Store, path: str) -> bool:
        """True if `path` is a folder of tensors, and of files that are written anew next to them."""
        return store.kind(path) == "directory" and holds_only_tensors(store, path, self.beside)


@final
@dataclass(frozen=True, slots=True)
class WithoutDigests:
    """Heads that are complete before anything is written; see `ArrangedDigests`."""

    heads: Mapping[str, bytes]

    @property
    def block_bytes(self) -> int:
        """Of no use here: larger than any leaf."""
        return sys.maxsize

    def add(self, ranges: Mapping[str, Sequence[WrittenRange]]) -> None:
        """Do nothing."""

    def head(self, file: str) -> bytes:
        """Return the head of a file."""
        return self.heads[file]

    def encoded(self) -> bytes:
        """Nothing."""
        return b""

    def join(self, encoded: bytes) -> None:
        """Do nothing.

        Raises:
            ValueError: If that was about an arrangement with checksums.
        """
        if encoded:
            raise ValueError("checksums of an arrangement that has none")


def _shards(tensors: Iterable[_Tensor], most: int) -> list[list[_Tensor]]:
    """Deal tensors to files as huggingface_hub does.

    A tensor that is larger than a file gets one at once, and the file before it goes on after it.
    """
    found: list[list[_Tensor]] = []
    current: list[_Tensor] = []
    nbytes = 0
    for tensor in tensors:
        size = tensor[2].nbytes
        if size > most:
            found.append([tensor])
            continue
        if nbytes + size > most:
            found.append(current)
            current, nbytes = [], 0

        current.append(tensor)
        nbytes += size

    if current or not found:
        found.append(current)

    return found


def _head(shard: Sequence[_Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[int, int]]:
    """Return what a file begins with, and where the data of each tensor begin after it."""
    # By name: safetensors writes them in no order, another one each time. Usually there is only `format`.
    document: dict[str, object] = {METADATA: dict(sorted(metadata.items()))}
    begins: dict[int, int] = {}
    end = 0
    for number, name, spec in sorted(shard, key=lambda tensor: (-_WIDTHS[tensor[2].dtype], tensor[1])):
        begins[number], end = end, end + spec.nbytes
        offsets = [begins[number], end]
        document[name] = {
            "dtype": CODES[spec.dtype],
            "shape": list(spec.shape or ()),
            "data_offsets": offsets,
        }

    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % 8)  # so that the data begin at a multiple of eight bytes
    if len(data) > MAX_HEADER_BYTES:
        problem = f"the header would have {len(data)} bytes, of at most {MAX_HEADER_BYTES}"
        raise SpecError(f"{problem}: there are too many leaves, or their names are too long")

    return len(data).to_bytes(8, "little") + data, begins


def _index(files: Sequence[str], shards: Sequence[Sequence[_Tensor]]) -> tuple[Document, ...]:
    if len(files) == 1:
        return ()

    tensors = [tensor for shard in shards for tensor in shard]
    document = {
        "metadata": {
            "total_parameters": sum([math.prod(spec.shape or ()) for _, _, spec in tensors]),
            "total_size": sum([spec.nbytes for _, _, spec in tensors]),
        },
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for _, name, _ in shard},
    }
    data = json.dumps(document, indent=2, sort_keys=True) + "\n"
    return (Document(f"model{INDEX_SUFFIX}", data.encode()),)
