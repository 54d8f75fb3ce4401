"""Test doubles that fail on demand, and conformance classes for stages, handlers and stores.

```python
store = FaultyStore(LocalStore())
store.fail_on("data.sync", 1, StorageError("fsync", path, "Input/output error", errno.EIO))
...
assert store.open_files == 0
```

To test a handler, stage or store, subclass its conformance class in a test file. For a store, also inherit
the class of each capability it has:

```python
class TestVocabulary(HandlerConformance):
    def make_handler(self): return VocabularyHandler()
    def values(self): return [Vocabulary(["a", "b"]), Vocabulary([])]

class TestMyStore(StoreConformance, RenameConformance, SharingConformance):
    def make_store(self): return MyStore()
```
"""

from __future__ import annotations

__all__ = (
    "Crash",
    "CrashStore",
    "DirectoryConformance",
    "ExchangeConformance",
    "FaultyStore",
    "ForeignFilesConformance",
    "FreeSpaceConformance",
    "HandlerConformance",
    "Hang",
    "HoldConformance",
    "KvStoreConformance",
    "ListingConformance",
    "LongFileConformance",
    "MappingConformance",
    "MemoryKeyValues",
    "MemoryStore",
    "Operation",
    "PowerLoss",
    "RenameConformance",
    "SharingConformance",
    "StageConformance",
    "StoppableKeyValues",
    "StoreConformance",
    "UntrustedFilesConformance",
    "WritingTogetherConformance",
    "lockless_store",
)

from penstock.testing.capability_conformance import (
    ExchangeConformance,
    ForeignFilesConformance,
    FreeSpaceConformance,
    HoldConformance,
    KvStoreConformance,
    ListingConformance,
    LongFileConformance,
    MappingConformance,
    RenameConformance,
    SharingConformance,
    UntrustedFilesConformance,
    WritingTogetherConformance,
)
from penstock.testing.crash_store import Crash, CrashStore
from penstock.testing.faulty_store import FaultyStore, Hang, Operation
from penstock.testing.handler_conformance import HandlerConformance
from penstock.testing.memory_key_values import MemoryKeyValues, StoppableKeyValues
from penstock.testing.memory_store import MemoryStore, lockless_store
from penstock.testing.stage_conformance import StageConformance
from penstock.testing.store_conformance import DirectoryConformance, StoreConformance
from penstock.testing.volatile_disk import PowerLoss
