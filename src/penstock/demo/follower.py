"""`python -m penstock.demo.follower OPTIONS`: the process of the demo that follows another one.

OPTIONS are `FollowingOptions` as a JSON object. Records go to stdout, one a line.
"""

from __future__ import annotations

import json
import sys

import anyio

from penstock.demo.following import FollowingOptions, follow
from penstock.demo.records import emit

if __name__ == "__main__":
    anyio.run(follow, FollowingOptions(**json.loads(sys.argv[1])), emit)
