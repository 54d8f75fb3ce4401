"""For tests of stages, handlers, stores and whole pipelines: doubles that fail on demand, and what must hold.

```python
store = FaultyStore(LocalStore())
store.fail_on("data.sync", 1, StorageError("fsync", path, "Input/output error", errno.EIO))
...
assert store.open_files == 0
```

Whoever writes a handler, a stage or a store proves it by a subclass in a file of tests:

```python
class TestVocabulary(HandlerConformance):
    def make_handler(self): return VocabularyHandler()
    def values(self): return [Vocabulary(["a", "b"]), Vocabulary([])]
```
"""

from __future__ import annotations

__all__ = (
    "Crash",
    "CrashStore",
    "FaultyStore",
    "HandlerConformance",
    "Hang",
    "Operation",
    "StageConformance",
    "StoreConformance",
)

from penstock.testing.crash_store import Crash, CrashStore
from penstock.testing.faulty_store import FaultyStore
from penstock.testing.handler_conformance import HandlerConformance
from penstock.testing.hang_points import Hang, Operation
from penstock.testing.stage_conformance import StageConformance
from penstock.testing.store_conformance import StoreConformance
