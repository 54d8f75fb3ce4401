"""Small checkpoints as somebody might write them who means harm, by name. A test reads each in every way."""

from __future__ import annotations

__all__ = ("STRANGE",)

import base64
import json
import os
import socket
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np
from crc32c import crc32c

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Digest, digest_of
from penstock.handlers.ocdbt.database_writer import encode_files, encode_index, encode_keys, shared_prefixes
from penstock.handlers.ocdbt.wire_format import (
    MANIFEST_MAGIC,
    NODE_MAGIC,
    Indirect,
    Inline,
    Value,
    seal,
    varint,
    varints,
)

Write: TypeAlias = Callable[[Path], object]

GIB: Final = 2**30
ZARRAY: Final[Mapping[str, Any]] = {
    "chunks": [4],
    "compressor": None,
    "dimension_separator": ".",
    "dtype": "<f4",
    "fill_value": 0.0,
    "filters": None,
    "order": "C",
    "shape": [4],
    "zarr_format": 2,
}
ZARR3: Final[Mapping[str, Any]] = {
    "chunk_grid": {"configuration": {"chunk_shape": [4]}, "name": "regular"},
    "chunk_key_encoding": {"name": "default"},
    "codecs": [{"configuration": {"endian": "little"}, "name": "bytes"}],
    "data_type": "float32",
    "fill_value": 0.0,
    "node_type": "array",
    "shape": [4],
    "zarr_format": 3,
}
CHUNK: Final = np.arange(4, dtype=np.float32).tobytes()
DEEP: Final = 100_000


def entry(keys: Sequence[Any], typestr: str = "np.ndarray", **value: Any) -> dict[str, Any]:
    steps = [{"key": key, "key_type": 2} for key in keys]
    return {
        "key_metadata": steps,
        "value_metadata": {"value_type": typestr, "skip_deserialize": False, **value},
    }


def sequence(keys: Sequence[str]) -> dict[str, Any]:
    """An entry whose last key is an index."""
    found = entry(keys, "None")
    found["key_metadata"][-1]["key_type"] = 1
    return found


def structure(entries: Mapping[str, Any], **members: Any) -> str:
    about = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return json.dumps({"tree_metadata": dict(entries), **about, "custom_metadata": None, **members})


def plain(path: Path, name: str = "a", *, zarray: Any = ZARRAY, chunk: bytes | None = CHUNK) -> Path:
    """Write a checkpoint of one array in a directory, in order."""
    folder = path / name
    folder.mkdir(parents=True)
    (path / "_METADATA").write_text(structure({str((name,)): entry([name])}))
    version = 3 if "node_type" in zarray else 2
    (folder / (".zarray" if version == 2 else "zarr.json")).write_text(json.dumps(zarray))
    file = folder / "0" if version == 2 else folder / "c" / "0"
    file.parent.mkdir(exist_ok=True)
    if chunk is not None:
        file.write_bytes(chunk)

    return path


def document(name: str, data: bytes | str) -> Write:
    """A checkpoint in order, but for one document of it."""

    def write(path: Path) -> None:
        file = plain(path) / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_bytes(data if isinstance(data, bytes) else data.encode())

    return write


def array(changes: Mapping[str, Any], chunk: bytes | None = CHUNK, base: Mapping[str, Any] = ZARRAY) -> Write:
    return lambda path: plain(path, zarray={**base, **changes}, chunk=chunk)


def tree(entries: Mapping[str, Any], **members: Any) -> Write:
    return document("_METADATA", structure(entries, **members))


def array_called(name: str) -> Write:
    return tree({str((name,)): entry([name])})


def database(
    values: Mapping[bytes, Value], names: Sequence[str] = ("a",), files: Sequence[str] = ()
) -> Write:
    """A checkpoint whose index holds these values."""

    def write(path: Path) -> None:
        (path / "d").mkdir(parents=True)
        entries = {str((name,)): entry([name]) for name in names}
        (path / "_METADATA").write_text(structure(entries, use_ocdbt=True))
        index = encode_index(
            sorted(values.items()), node_file="d/n", node_offset=0, uuid=bytes(16), commit_time_ns=0
        )
        (path / "d" / "n").write_bytes(index.nodes)
        (path / "d" / "x").write_bytes(CHUNK * 4)
        (path / "manifest.ocdbt").write_bytes(index.manifest)

    return write


def nodes(root: tuple[int, int], body: bytes, *, magic: bytes = NODE_MAGIC, n_keys: int = 1) -> Write:
    """A database whose root is said to have a height and a length, and whose one file of nodes is `body`."""

    def write(path: Path) -> None:
        database({})(path)
        height, nbytes = root
        manifest = b"".join(
            (
                bytes(16),
                varints((0, 1024, 10**8)),
                bytes((4, 0)),
                encode_files(["d/n"]),
                varints((1, 1)),
                bytes((height,)),
                varints((0, 0, nbytes, n_keys, nbytes, 0)),
                bytes(8),
                b"\0",
            )
        )
        (path / "d" / "n").write_bytes(body)
        (path / "manifest.ocdbt").write_bytes(seal(MANIFEST_MAGIC, manifest))

    return write


def inner_node(height: int, children: Sequence[tuple[bytes, int, int]], file: str = "d/n") -> bytes:
    """A node whose children have keys, offsets and lengths."""
    keys = [key for key, _, _ in children]
    prefixes, lengths, suffixes = encode_keys(keys, shared_prefixes(keys), 0)
    n = len(children)
    body = b"".join(
        (
            bytes((height,)),
            encode_files([file]),
            varint(n),
            prefixes,
            lengths,
            bytes(n),
            suffixes,
            bytes(n),
            varints([offset for _, offset, _ in children]),
            varints([nbytes for _, _, nbytes in children]),
            varints([1] * n),
            varints([1] * n),
            varints([1] * n),
        )
    )
    return seal(NODE_MAGIC, body)


def leaf_node(files: bytes, keys: bytes, values: bytes) -> bytes:
    return seal(NODE_MAGIC, b"\0" + files + keys + values)


def raw_files(path: bytes) -> bytes:
    """A table of data files with one row, whatever its name is."""
    return varint(1) + varint(len(path)) + b"\0" + path


def one_value(name: bytes, offset: int = 0, length: int = 16) -> Write:
    """A leaf node with one key, whose value lies in a data file of any name."""
    key = varint(1) + varint(len(b"a/0")) + b"a/0"
    node = leaf_node(raw_files(name), key, varint(length) + b"\1" + b"\0" + varint(offset))
    return nodes((0, len(node)), node)


def self_referring(path: Path) -> None:
    """Every node of every height is the same one."""
    node = inner_node(9, [(b"a", 0, 200)])
    node = inner_node(9, [(b"a", 0, len(node))])
    nodes((9, len(node)), node)(path)


def zstd_of_zeros(nbytes: int) -> bytes:
    """A frame of blocks that are one byte each, repeated: 128 KiB from four bytes."""
    frame = bytes.fromhex("28b52ffd") + b"\xe0" + struct.pack("<Q", nbytes)
    for at in range(0, nbytes, 2**17):
        size = min(2**17, nbytes - at)
        frame += (int(at + size == nbytes) | 1 << 1 | size << 3).to_bytes(3, "little") + b"\0"

    return frame


def compressed(magic: bytes, body: bytes) -> bytes:
    """Seal a body as one that is compressed with zstd."""
    head = magic + (18 + len(body)).to_bytes(8, "little") + bytes((0, 1))
    return head + body + crc32c(head + body).to_bytes(4, "little")


def compressed_node(path: Path) -> None:
    node = compressed(NODE_MAGIC, zstd_of_zeros(4 * GIB))
    nodes((0, len(node)), node)(path)


def compressed_manifest(path: Path) -> None:
    database({})(path)
    (path / "manifest.ocdbt").write_bytes(compressed(MANIFEST_MAGIC, zstd_of_zeros(4 * GIB)))


def numbered_manifest(path: Path) -> None:
    database({})(path)
    body = bytes(16) + varints((1, 1024, 10**8)) + bytes((4, 0))
    for name in ("manifest.ocdbt", "manifest.0000000000000001"):
        (path / name).write_bytes(seal(MANIFEST_MAGIC, body))


def gzip_of_zeros(nbytes: int) -> bytes:
    """A stream of one block, packed once, again and again: a full flush ends each, so none needs another."""
    packer, size = zlib.compressobj(9), 2**20
    packed = packer.compress(bytes(size)) + packer.flush(zlib.Z_FULL_FLUSH)
    head, block = packed[:2], packed[2:]
    adler32 = nbytes % 65521 << 16 | 1
    return head + block * (nbytes // size) + b"\3\0" + adler32.to_bytes(4, "big")


def record(files: Mapping[str, Sequence[tuple[int, int, int]]], documents: Mapping[str, Digest]) -> Write:
    """A checkpoint with a record of penstock's, that says anything."""

    def write(path: Path) -> None:
        columns = {file: columns_of(pieces) for file, pieces in files.items()}
        data = integrity.encode_files(columns, {}, documents, None)
        (plain(path) / "_PENSTOCK_INTEGRITY").write_bytes(data)

    return write


def columns_of(pieces: Sequence[tuple[int, int, int]]) -> dict[str, bytes]:
    offsets, lengths, sums = zip(*pieces, strict=True)
    return {
        "offsets": np.array(offsets, "<u8").tobytes(),
        "nbytes": np.array(lengths, "<u8").tobytes(),
        "crc32c": np.array(sums, "<u4").tobytes(),
    }


def read_again_and_again(path: Path) -> None:
    """A record that lists one range of a long file any number of times."""
    plain(path)
    with (path / "a" / "0").open("r+b") as file:
        file.truncate(64 * 2**20)
    columns = integrity.columns([(0, 64 * 2**20, 1)] * 100_000)
    (path / "_PENSTOCK_INTEGRITY").write_bytes(integrity.encode_files({"a/0": columns}, {}, {}, None))


def hole_to_compare(path: Path) -> None:
    plain(path)
    with (path / "a" / "0").open("r+b") as file:
        file.truncate(2**42)
    columns = integrity.columns([(0, 2**42, 1)])
    (path / "_PENSTOCK_INTEGRITY").write_bytes(integrity.encode_files({"a/0": columns}, {}, {}, None))


def chunks_in_one_piece(path: Path) -> None:
    """Each of many chunks has the checksum of one piece, which would be read for each of them."""
    n, size = 300, 32 * 2**20
    names = [f"a{at}" for at in range(n)]
    values: dict[bytes, Value] = {
        f"{name}/.zarray".encode(): Inline(json.dumps(ZARRAY).encode()) for name in names
    }
    values |= {f"{name}/0".encode(): Indirect("d/x", 16 * at, 16) for at, name in enumerate(names)}
    database(values, names)(path)
    with (path / "d" / "x").open("r+b") as file:
        file.truncate(size)
    columns = integrity.columns([(0, size, 1)])
    (path / "_PENSTOCK_INTEGRITY").write_bytes(integrity.encode_files({"d/x": columns}, {}, {}, None))


def linked_rooms(path: Path, depth: int = 40) -> None:
    """Directories that lead to the next one by two links each: 2**40 paths, and no loop."""
    plain(path)
    for at in range(depth):
        room = path / "rooms" / str(at)
        room.mkdir(parents=True)
        for name in ("l", "r"):
            (room / name).symlink_to(f"../{at + 1}")
    (path / "rooms" / str(depth)).mkdir()


def linked_arrays(path: Path, depth: int = 40) -> None:
    """The same, without a document, so that arrays are looked for in all of them."""
    plain(path)
    (path / "_METADATA").unlink()
    for at in range(depth):
        room = path / f"room{at}"
        room.mkdir()
        for name in ("l", "r"):
            (room / name).symlink_to(f"../room{at + 1}")
    (path / f"room{depth}").mkdir()


def linked_chunks(path: Path) -> None:
    """Links in the directory of an array whose chunks are many, so that it is listed."""
    plain(path, zarray={**ZARRAY, "shape": [4000]})
    for name in ("l", "r"):
        (path / "a" / name).symlink_to(".")


def looped(name: str) -> Write:
    def write(path: Path) -> None:
        file = plain(path) / name
        if file.is_dir():
            os.rename(file, path / "elsewhere")
        file.unlink(missing_ok=True)
        file.symlink_to(file.name)

    return write


def directory_at(name: str) -> Write:
    def write(path: Path) -> None:
        file = plain(path) / name
        file.unlink(missing_ok=True)
        file.mkdir()

    return write


def socket_at(name: str) -> Write:
    def write(path: Path) -> None:
        file = plain(path) / name
        file.unlink(missing_ok=True)
        here = Path.cwd()
        os.chdir(file.parent)  # the name of a socket may have a hundred bytes
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(file.name)
        finally:
            os.chdir(here)

    return write


def tensors(header: Any, data: bytes = CHUNK, length: int | None = None) -> Write:
    def write(path: Path) -> None:
        path.mkdir()
        head = header if isinstance(header, bytes) else json.dumps(header).encode()
        size = len(head) if length is None else length
        (path / "x.safetensors").write_bytes(size.to_bytes(8, "little") + head + data)

    return write


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}


def shards(weights: Any) -> Write:
    def write(path: Path) -> None:
        tensors({"a": tensor()})(path)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))

    return write


def packed(data: bytes) -> Write:
    def write(path: Path) -> None:
        path.mkdir()
        (path / "checkpoint").write_bytes(data)

    return write


def packed_array(shape: Sequence[Any], nbytes: int, dtype: str = "float32") -> bytes:
    return msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb([list(shape), dtype, bytes(nbytes)]))})


def packed_in_chunks(shape: Sequence[int]) -> bytes:
    chunk = msgpack.ExtType(1, msgpack.packb([[0], "float32", b""]))
    sizes = {str(at): size for at, size in enumerate(shape)}
    return msgpack.packb({"a": {"__msgpack_chunked_array__": True, "shape": sizes, "chunks": {"0": chunk}}})


def item(name: str, file: str, data: bytes | str) -> Write:
    """A checkpoint of one item that is a document."""

    def write(path: Path) -> None:
        (path / name).mkdir(parents=True)
        (path / name / file).write_bytes(data if isinstance(data, bytes) else data.encode())
        (path / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {name: "x"}}))

    return write


def shardings(text: str) -> Write:
    name = base64.urlsafe_b64encode(b"a").decode()
    return document("_sharding", json.dumps({name: text}))


NESTED: Final = "[" * DEEP + "]" * DEEP
NESTED_OBJECTS: Final = '{"a":' * DEEP + "1" + "}" * DEEP
LONG_NUMBER: Final = "9" * 10_000
A: Final = str(("a",))
INDEX_OF_A: Final[Mapping[bytes, Value]] = {b"a/.zarray": Inline(json.dumps(ZARRAY).encode())}

STRANGE: Final[Mapping[str, Write]] = {
    # JSON
    "deep _METADATA": document("_METADATA", NESTED),
    "deep custom metadata": document("_METADATA", structure({A: entry(["a"])})[:-5] + NESTED + "}"),
    "deep value tree": document(
        "_METADATA", structure({A: entry(["a"])})[:-1] + f', "value_metadata_tree": {NESTED_OBJECTS}}}'
    ),
    "numbers that are none": document(
        "_METADATA", structure({A: entry(["a"], write_shape=[float("nan"), float("inf")])})
    ),
    "a long number": document("_METADATA", structure({A: entry(["a"])})[:-5] + LONG_NUMBER + "}"),
    "UTF-16": document("_METADATA", structure({A: entry(["a"])}).encode("utf-16")),
    "UTF-32": document("_CHECKPOINT_METADATA", "{}".encode("utf-32")),
    "a leaf twice": tree({"x": entry(["a"]), "y": entry(["a"])}),
    "an entry twice": document(
        "_METADATA",
        structure({A: entry(["a"])}).replace('{"tree_metadata": {', '{"tree_metadata": {"(\'a\',)": {}, '),
    ),
    "deep checkpoint metadata": document("_CHECKPOINT_METADATA", NESTED_OBJECTS),
    "times without end": document(
        "_CHECKPOINT_METADATA", '{"init_timestamp_nsecs": 1e999, "commit_timestamp_nsecs": NaN}'
    ),
    "handlers that are no names": document(
        "_CHECKPOINT_METADATA", '{"item_handlers": {"a": [1], "../x": {}}}'
    ),
    "deep strings": document("_strings.json", NESTED_OBJECTS),
    "deep shardings": shardings(NESTED_OBJECTS),
    "a sharding over any number of devices": shardings(
        json.dumps(
            {
                "sharding_type": "NamedSharding",
                "shape": [2**40],
                "axis_names": ["x"],
                "partition_spec": ["x"],
                "device_mesh": {"mesh": [{"id": 2**70}] * 3},
            }
        )
    ),
    "deep array_metadatas": document("array_metadatas/process_0", NESTED),
    "array_metadatas that are a file": document("array_metadatas", "{}"),
    # arrays
    "a negative shape": array({"shape": [-4]}),
    "an array of no bytes, at length": array({"shape": [2**62, 0], "chunks": [1, 1]}, chunk=None),
    "a shape of fractions": array({"shape": [4.5], "chunks": [True]}),
    "a shape of nothing": array({"shape": [float("nan")]}),
    "a shape with a long number": document(
        "a/.zarray", json.dumps(ZARRAY).replace("[4]", f"[{LONG_NUMBER}]")
    ),
    "a dtype of nothing": array({"dtype": "<f999999999"}),
    "a dtype that is an object": array({"dtype": "|O"}),
    "a fill value that is a book": array({"fill_value": "9" * 100_000}, chunk=None),
    "a fill value that is nested": array({"fill_value": [[[[1]]]]}, chunk=None),
    "codecs that are none": array({"compressor": {"id": "none such", "level": NESTED[:50]}}),
    "filters of filters": array({"filters": [{"id": "shuffle", "elementsize": 2**62}] * 50}),
    "no codecs": array({"codecs": []}, base=ZARR3),
    "codecs that are numbers": array({"codecs": [1, None]}, base=ZARR3),
    "shards in shards": array(
        {
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [1],
                        "codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [2**40]}}],
                        "index_codecs": [],
                    },
                }
            ]
        },
        base=ZARR3,
    ),
    "an axis of a long name": array({"chunk_key_encoding": {"name": "v2", "configuration": 7}}, base=ZARR3),
    "a chunk of zeros, zipped": array({"compressor": {"id": "zlib", "level": 9}}, gzip_of_zeros(GIB)),
    "a chunk of zeros, zstd": array({"compressor": {"id": "zstd", "level": 1}}, zstd_of_zeros(4 * GIB)),
    "a chunk of zeros, blosc": array(
        {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 0}},
        struct.pack("<BBBBIII", 2, 1, 0x21, 4, 2**31 - 1, 2**31 - 1, 30) + bytes(14),
    ),
    "many tiny chunks that were never written": array({"shape": [2**24], "chunks": [1]}, chunk=None),
    # names
    "a key with a zero byte": array_called("a\0b"),
    "a key that leads up": array_called(".."),
    "a key that leads away": array_called("/etc/passwd"),
    "a key too long for a file": array_called("a" * 5000),
    "a key of dots": array_called("......"),
    "an index that is a long number": tree({"x": sequence(["a", "9" * 10_000])}),
    "an index beyond any list": tree({"x": sequence(["a", "4000000000"])}),
    # the index
    "a node in itself": self_referring,
    "a node at two places": lambda path: nodes(
        (1, len(inner_node(1, [(b"a", 0, 99), (b"b", 0, 99)]))), inner_node(1, [(b"a", 0, 99), (b"b", 0, 99)])
    )(path),
    "a node behind the end": lambda path: nodes((200, 10**18), inner_node(200, [(b"a", 10**18, 10**18)]))(
        path
    ),
    "any number of keys": nodes((0, 64), leaf_node(raw_files(b"d/x"), varint(2**62), b""), n_keys=2**62),
    "manifests that refer to each other": numbered_manifest,
    "a compressed node of zeros": compressed_node,
    "a compressed manifest of zeros": compressed_manifest,
    "a data file that leads up": one_value(b"../../../etc/passwd"),
    "a data file that leads away": one_value(b"/etc/passwd"),
    "a data file with a zero byte": one_value(b"d/x\0y"),
    "a data file with a long name": one_value(b"d/" + b"x" * 60_000),
    "a data file that is no text": one_value(b"d/\xff\xfe"),
    "a data file that is the manifest": one_value(b"manifest.ocdbt"),
    "a data file that is a directory": one_value(b"d"),
    "a value at a negative offset": one_value(b"d/x", 2**64 - 16),
    "a value without end": one_value(b"d/x", 0, 2**63),
    "keys that lead up": database({b"../../a/.zarray": Inline(b"{}"), b"a\0/0": Inline(b""), **INDEX_OF_A}),
    "chunks in one another": database(
        {
            b"a/.zarray": Inline(json.dumps({**ZARRAY, "shape": [4000]}).encode()),
            **{f"a/{at}".encode(): Indirect("d/x", at % 5, 16) for at in range(1000)},
        }
    ),
    "metadata of an array that is nested": database({b"a/.zarray": Inline(NESTED[:1000].encode())}),
    "a chunk in the index of another size": database({**INDEX_OF_A, b"a/0": Inline(b"12345")}),
    # penstock's record
    "a deep record": document("_PENSTOCK_INTEGRITY", b"\x91" * DEEP),
    "a range again and again": read_again_and_again,
    "a hole to compare": hole_to_compare,
    "chunks in one piece": chunks_in_one_piece,
    "a range behind all offsets": record({"a/0": [(2**63, 2**63, 1), (2**64 - 1, 2**64 - 1, 2)]}, {}),
    "a record of a file elsewhere": record({"/etc/passwd": [(0, 10, 1)], "../x": [(0, 1, 1)]}, {}),
    "a record of a document elsewhere": record(
        {}, {"/etc/passwd": digest_of(b""), "../../x": digest_of(b"")}
    ),
    "a record of a document with a zero byte": record({}, {"a\0b": digest_of(b""), "": digest_of(b"")}),
    # files that are none
    "rooms with two doors": linked_rooms,
    "arrays behind two doors": linked_arrays,
    "chunks behind two doors": linked_chunks,
    "a document that is a link to itself": looped("_METADATA"),
    "an array that is a link to itself": looped("a"),
    "a chunk that is a link to itself": looped("a/0"),
    "a document that is a directory": directory_at("_METADATA"),
    "checkpoint metadata that is a directory": directory_at("_CHECKPOINT_METADATA"),
    "a record that is a directory": directory_at("_PENSTOCK_INTEGRITY"),
    "a mark that is a directory": directory_at("commit_success.txt"),
    "a chunk that is a directory": directory_at("a/0"),
    "shardings that are a directory": directory_at("_sharding"),
    "a document that is a socket": socket_at("_METADATA"),
    "a record that is a socket": socket_at("_PENSTOCK_INTEGRITY"),
    "a chunk that is a socket": socket_at("a/0"),
    # safetensors
    "a header without end": tensors({"a": tensor()}, length=2**63),
    "a deep header": tensors(NESTED_OBJECTS.encode()),
    "a header in UTF-16": tensors(json.dumps({"a": tensor()}).encode("utf-16")),
    "tensors in one another": tensors({"a": tensor(), "b": tensor()}),
    "a tensor at a negative offset": tensors({"a": tensor(data_offsets=[-16, 0])}),
    "a tensor at no offset": tensors(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[NaN,1e999]}}'),
    "a tensor with a zero byte": tensors({"a\0b": tensor(), "": tensor(shape=[0], data_offsets=[16, 16])}),
    "a tensor twice": tensors(b'{"a":' + json.dumps(tensor()).encode() + b',"a":{}}'),
    "a tensor of a long shape": tensors({"a": tensor(shape=[2**62, 2**62])}),
    "a tensor of nothing, at length": tensors({"a": tensor(shape=[2**62, 0], data_offsets=[0, 0])}, b""),
    "a shard that leads up": shards({"a": "../x.safetensors"}),
    "a shard that leads away": shards({"a": "/etc/x.safetensors"}),
    "a shard with a zero byte": shards({"a": "x\0.safetensors"}),
    "a shard with a long name": shards({"a": "x" * 5000 + ".safetensors"}),
    "a shard that is no name": shards({"a": 7}),
    # msgpack
    "deep msgpack": packed(b"\x91" * DEEP + b"\xc0"),
    "deep maps": packed(b"\x81\xa1a" * DEEP + b"\xc0"),
    "a map of any number": packed(b"\xdf\xff\xff\xff\xff" + b"\xa1a\xc0"),
    "an extension without end": packed(b"\x81\xa1a\xc9\xff\xff\xff\xff\x01"),
    "an array of a long shape": packed(packed_array([2**40, 2**40], 16)),
    "an array of a negative shape": packed(packed_array([-4], 16)),
    "an array of nothing, at length": packed(packed_array([2**62, 0], 0)),
    "chunks of any number of axes": packed(packed_in_chunks([0] * 100)),
    "chunks of nothing, at length": packed(packed_in_chunks([2**62, 0])),
    "an array of a dtype that is none": packed(packed_array([4], 16, "\0")),
    "keys that are one": packed(b"\x82\x01\xc0\xa11\xc0"),
    "a key with a zero byte, packed": packed(msgpack.packb({"a\0b": 1.5, "/": 2})),
    # items
    "a deep item": item("about", "metadata", NESTED_OBJECTS),
    "an item of numbers that are none": item("about", "metadata", '{"a": NaN, "b": 1e999, "c": -Infinity}'),
    "an item of a long number": item("about", "metadata", f'{{"a": {LONG_NUMBER}}}'),
    "an item of half characters": item("about", "metadata", '{"\\ud800": "\\udfff"}'),
    "an item that is no text": item("about", "proto.pbtxt", "x".encode("utf-16")),
    "metrics that are nested": item("metrics", "metrics", NESTED),
}
