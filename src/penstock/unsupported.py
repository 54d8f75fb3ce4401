"""Refuses in words to be imported where penstock does not run."""

from __future__ import annotations

__all__ = ("refuse_free_threading", "refuse_windows")

from collections.abc import Callable


def refuse_free_threading(is_gil_enabled: Callable[[], bool] | None) -> None:
    """Refuse an interpreter that runs threads without the lock.

    The packages that penstock needs do not all say that they work there, and penstock was not tried there.

    Args:
        is_gil_enabled: `sys._is_gil_enabled`; None before Python 3.13, which always has the lock.

    Raises:
        ImportError: If the lock is off.
    """
    if is_gil_enabled is None or is_gil_enabled():
        return

    raise ImportError(
        "penstock does not support Python without the global interpreter lock yet; "
        "PYTHON_GIL=1 in the environment turns the lock on"
    )


def refuse_windows(platform: str) -> None:
    """Refuse Windows, which lacks the locks and renames that keep checkpoints whole.

    Args:
        platform: `sys.platform`.

    Raises:
        ImportError: If it is Windows. The Linux within it (WSL) is Linux.
    """
    if platform == "win32":
        raise ImportError(
            "penstock does not support Windows; it runs in the Windows Subsystem for Linux (wsl --install)"
        )
