"""The built-in stages, one actor per file: what happens to a checkpoint between the caller and the disk.

A save runs flatten, prioritise, device_to_host, (encode,) limit_bytes, write, commit, finalize; a restore
runs locate, plan, prioritise, limit_bytes, read, host_to_device, (derive,) assemble. Importing this package
is cheap: each name is fetched from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "Assemble",
    "Commit",
    "Deliver",
    "Derive",
    "DeviceToHost",
    "Encode",
    "Finalize",
    "Flatten",
    "HostToDevice",
    "InOrder",
    "LimitBytes",
    "Locate",
    "Plan",
    "Prioritise",
    "Read",
    "Write",
)

if TYPE_CHECKING:
    from penstock.stages.assemble import Assemble
    from penstock.stages.commit import Commit
    from penstock.stages.deliver import Deliver
    from penstock.stages.derive import Derive
    from penstock.stages.device_to_host import DeviceToHost
    from penstock.stages.encode import Encode
    from penstock.stages.finalize import Finalize
    from penstock.stages.flatten import Flatten
    from penstock.stages.host_to_device import HostToDevice
    from penstock.stages.limit_bytes import LimitBytes
    from penstock.stages.locate import Locate
    from penstock.stages.plan import Plan
    from penstock.stages.prioritise import Prioritise
    from penstock.stages.read import Read
    from penstock.stages.reorder import InOrder
    from penstock.stages.write import Write
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.stages.assemble": ("Assemble",),
            "penstock.stages.commit": ("Commit",),
            "penstock.stages.deliver": ("Deliver",),
            "penstock.stages.derive": ("Derive",),
            "penstock.stages.device_to_host": ("DeviceToHost",),
            "penstock.stages.encode": ("Encode",),
            "penstock.stages.finalize": ("Finalize",),
            "penstock.stages.flatten": ("Flatten",),
            "penstock.stages.host_to_device": ("HostToDevice",),
            "penstock.stages.limit_bytes": ("LimitBytes",),
            "penstock.stages.locate": ("Locate",),
            "penstock.stages.plan": ("Plan",),
            "penstock.stages.prioritise": ("Prioritise",),
            "penstock.stages.read": ("Read",),
            "penstock.stages.reorder": ("InOrder",),
            "penstock.stages.write": ("Write",),
        },
    )
