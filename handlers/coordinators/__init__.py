"""The processes of a job agree on an operation: keys, pure decisions, membership, the operation, services."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "JaxKeyValues",
    "JobCoordinator",
    "JointOperation",
)

if TYPE_CHECKING:
    from penstock.handlers.coordinators.jax_key_values import JaxKeyValues
    from penstock.handlers.coordinators.job_coordinator import JobCoordinator
    from penstock.handlers.coordinators.joint_operation import JointOperation
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.handlers.coordinators.jax_key_values": ("JaxKeyValues",),
            "penstock.handlers.coordinators.job_coordinator": ("JobCoordinator",),
            "penstock.handlers.coordinators.joint_operation": ("JointOperation",),
        },
    )
