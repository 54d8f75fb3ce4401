"""The names of Orbax's checkpoint API (v0) over penstock's pipelines: `import penstock.orbax as ocp`."""

from __future__ import annotations

__all__ = ()
