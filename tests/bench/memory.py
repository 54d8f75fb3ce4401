from __future__ import annotations
from tests.bench.results import Results
def measure_memory(*a): return Results()
