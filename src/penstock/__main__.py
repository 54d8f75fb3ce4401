"""`python -m penstock`, the same as `penstock`."""

from __future__ import annotations

from runpy import run_module

if __name__ == "__main__":
    run_module(
        "penstock.cli", run_name="__main__", alter_sys=True
    )  # not imported: nothing below needs the command
