"""`python -m penstock.keeper`: the process itself. `penstock keeper run` and `ensure_keeper` start it."""

from __future__ import annotations

import sys

from penstock.keeper.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
