"""`python -m penstock.cli.worker OPTIONS`: one training process of the demo.

OPTIONS are `TrainingOptions` as a JSON object. Records go to stdout, one a line.
"""

from __future__ import annotations

import json
import sys

import anyio

from penstock.cli.records import Record, encode
from penstock.cli.training import TrainingOptions, train


def _emit(record: Record) -> None:
    sys.stdout.write(encode(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(train, TrainingOptions(**json.loads(sys.argv[1])), _emit)
