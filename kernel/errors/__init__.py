"""Every error that penstock raises: one base, and four families by what the caller can do.

`SpecError` is about the call, `HandlerError` about a leaf type without a handler or a handler that failed,
`StorageError` about the medium, `CorruptCheckpointError` about the data on it. Where Python has an error
of that kind (`FileNotFoundError`, `TypeError`), the class inherits from it, too.
"""

from __future__ import annotations

# One name to a line would be longer than the rest of the file.
# fmt: off
__all__ = (
    "AccessDeniedError",
    "AmbiguousHandlerError",
    "BuildChangedError",
    "ChangedLeafError",
    "ChecksumError",
    "ClaimLostError",
    "ClosedError",
    "ConfigError",
    "CoordinationError",
    "CorruptCheckpointError",
    "DeletedLeafError",
    "DestinationExistsError",
    "DuplicateNameError",
    "ExpansionError",
    "ForkedError",
    "HandlerError",
    "HandlerFailedError",
    "InUseError",
    "InactiveProcessError",
    "IncompleteCheckpointError",
    "IncompletePipelineError",
    "InsufficientMemoryError",
    "InvalidLeafError",
    "LeaseTooLargeError",
    "LinkOutsideError",
    "MissingExtraError",
    "MissingFileError",
    "NoHandlerError",
    "NoSpaceError",
    "NoThreadError",
    "NotACheckpointError",
    "NotAFileError",
    "NotDurableError",
    "NotOnThisDiskError",
    "NotSharedError",
    "OlderStepError",
    "OutcomeUnknownError",
    "PathError",
    "PeerError",
    "PeerFailedError",
    "PeerSilentError",
    "PenstockError",
    "PipelineError",
    "PlansDifferError",
    "ReplacedError",
    "ResultTypeError",
    "RootInUseError",
    "RunningLoopError",
    "SaveCancelledError",
    "SpecError",
    "StageFailedError",
    "StepExistsError",
    "StorageError",
    "StructureMismatchError",
    "ThrottledError",
    "TreeDifference",
    "TruncatedDataError",
    "UnknownMetricError",
    "UnreachableError",
    "UnsupportedByStoreError",
    "UnsupportedFormatError",
)
# fmt: on

from penstock.kernel.errors.bucket_errors import (
    AccessDeniedError,
    MissingExtraError,
    ThrottledError,
    UnreachableError,
)
from penstock.kernel.errors.corruption_errors import (
    ChecksumError,
    ExpansionError,
    IncompleteCheckpointError,
    LinkOutsideError,
    MissingFileError,
    NotACheckpointError,
    NotAFileError,
    TruncatedDataError,
    UnsupportedFormatError,
)
from penstock.kernel.errors.families import (
    CorruptCheckpointError,
    HandlerError,
    PenstockError,
    SpecError,
    StorageError,
)
from penstock.kernel.errors.handler_errors import (
    AmbiguousHandlerError,
    HandlerFailedError,
    NoHandlerError,
)
from penstock.kernel.errors.process_errors import (
    CoordinationError,
    NotOnThisDiskError,
    NotSharedError,
    OutcomeUnknownError,
    PeerError,
    PeerFailedError,
    PeerSilentError,
    PlansDifferError,
    StageFailedError,
)
from penstock.kernel.errors.restore_errors import InsufficientMemoryError, NoThreadError, ReplacedError
from penstock.kernel.errors.room_errors import NoSpaceError
from penstock.kernel.errors.save_errors import (
    BuildChangedError,
    ClaimLostError,
    IncompletePipelineError,
    InUseError,
    NotDurableError,
    SaveCancelledError,
)
from penstock.kernel.errors.spec_errors import (
    ClosedError,
    ConfigError,
    DestinationExistsError,
    ForkedError,
    InactiveProcessError,
    LeaseTooLargeError,
    OlderStepError,
    PathError,
    PipelineError,
    RootInUseError,
    RunningLoopError,
    StepExistsError,
    UnknownMetricError,
    UnsupportedByStoreError,
)
from penstock.kernel.errors.tree_errors import (
    ChangedLeafError,
    DeletedLeafError,
    DuplicateNameError,
    InvalidLeafError,
    ResultTypeError,
    StructureMismatchError,
    TreeDifference,
)
