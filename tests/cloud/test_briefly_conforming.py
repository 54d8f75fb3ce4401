"""A bucket on a server passes the tests of stores. `make test` asks moto, and `make cloud` every server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cloud.conftest import ASKED, SERVERS
from tests.cloud.servers import Server

from penstock.handlers.stores.buckets import MARK, BucketStore
from penstock.kernel import Store
from penstock.testing import LongFileConformance, SharingConformance, StoreConformance

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(240),
    pytest.mark.parametrize("server", list(SERVERS) if ASKED else ["moto"], indirect=True),
]

LIST_WHAT_IS_GONE = {
    "test_what_is_discarded_is_gone",
    "test_remove_tree_removes_what_is_below_and_no_more",
    "test_checkpoints_are_saved_and_restored_and_undone_wherever_it_fails",
}


class TestConformance(StoreConformance, SharingConformance, LongFileConformance):
    own_names = frozenset({MARK})
    bucket: str
    connect: Any

    @pytest.fixture(autouse=True)
    def _bucket(self, environ: Server, request: pytest.FixtureRequest) -> None:
        if environ.name == "SeaweedFS" and request.function.__name__ in LIST_WHAT_IS_GONE:
            pytest.skip("SeaweedFS lists a folder for a while after its last object has gone")

        self.bucket = environ.bucket
        self.connect = environ.connect(environ.url().rsplit("/", 1)[-1])

    def make_store(self) -> Store:
        return BucketStore(self.bucket, self.connect, file_bytes=2**20)

    def root(self, tmp_path: Path) -> str:
        return self.bucket
