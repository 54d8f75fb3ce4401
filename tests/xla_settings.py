"""How XLA compiles for tests."""

from __future__ import annotations

__all__ = ("xla_flags",)

from importlib.metadata import version

_QUICK_COMPILATION = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
"""Compiling takes half as long. What a test compiles, such as `jnp.ones`, runs once: at its best speed it
would not be quicker by what optimising it takes. An XLA that does not know a flag ends the process, and names
the flag."""

if version("jaxlib").startswith("0.10."):
    _QUICK_COMPILATION.append("--xla_cpu_use_fusion_emitters=false")  # later ones do not know it


def xla_flags(n_devices: int, *more: str) -> str:
    """Return the `XLA_FLAGS` of a process with so many CPU devices."""
    return " ".join((f"--xla_force_host_platform_device_count={n_devices}", *_QUICK_COMPILATION, *more))
