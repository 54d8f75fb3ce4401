"""Options of `convert` and `repair` for storing arrays."""

from __future__ import annotations

__all__ = ("add_storage_options", "chosen_format", "said_format")

import argparse

from penstock.kernel.protocols.save_format import SaveFormat


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Add the options. Those of another format than Orbax's have no effect on them."""
    parser.add_argument(
        "--codec", default="none", metavar="CODEC",
        help="for arrays: none, auto, floats, floats:archive, zstd or zstd:LEVEL (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--zarr", type=int, choices=(2, 3), default=2, help="version of the arrays there (%(default)s)"
    )
    parser.add_argument(
        "--directories", action="store_true", help="a directory for each array there, and no OCDBT database"
    )
    parser.add_argument(
        "--max-expansion", type=int, metavar="TIMES",
        help="how many times the bytes stored the arrays of SOURCE may take (1000)",
    )  # fmt: skip


def chosen_format(options: argparse.Namespace) -> SaveFormat | None:
    """Return the format that the options ask for; None if they ask for none.

    Raises:
        ConfigError: If the codec is not one.
    """
    found = SaveFormat(ocdbt=not options.directories, zarr=options.zarr, codec=options.codec)
    return None if found == SaveFormat() else found


def said_format(options: argparse.Namespace) -> str:
    """Return in words how arrays were stored in Orbax's layout."""
    place = "directories" if options.directories else "OCDBT"
    codec = "no codec" if options.codec == "none" else options.codec
    return f"{place}, zarr {options.zarr}, {codec}"
