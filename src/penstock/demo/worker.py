"""`python -m penstock.demo.worker OPTIONS`: one training process of the demo.

OPTIONS are `TrainingOptions` as a JSON object. Records go to stdout, one a line.
"""

from __future__ import annotations

import json
import sys

import anyio

from penstock.demo.records import emit
from penstock.demo.training import TrainingOptions, train

if __name__ == "__main__":
    anyio.run(train, TrainingOptions(**json.loads(sys.argv[1])), emit)
