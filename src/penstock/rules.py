"""Rules: what becomes of the leaves of a checkpoint, as data.

`convert`, `restore` and `penstock convert --rules` take them.
"""

from __future__ import annotations

__all__ = (
    "RECIPES",
    "Cast",
    "Concat",
    "Constant",
    "Dequantize",
    "Drop",
    "Pad",
    "PlannedLeaf",
    "Rename",
    "Repeat",
    "Reshape",
    "Rule",
    "Rules",
    "Select",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "load_recipe",
    "load_rules",
    "preview",
)

import os
import tomllib
from typing import TYPE_CHECKING, Final

from penstock.kernel.errors import SpecError
from penstock.kernel.rules import (
    Cast,
    Concat,
    Constant,
    Dequantize,
    Drop,
    Pad,
    Rename,
    Repeat,
    Reshape,
    Rule,
    Rules,
    Select,
    Split,
    Stack,
    Transpose,
    Unstack,
    parse_rules,
)
from penstock.kernel.words import hint_at

if TYPE_CHECKING:
    from penstock.tools.preview import PlannedLeaf, preview
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, {"penstock.tools.preview": ("PlannedLeaf", "preview")})

RECIPES: Final = frozenset(
    {"bert", "gemma", "gpt2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "vit", "whisper"}
)
"""The names of the recipes: files of rules from models of Hugging Face's transformers to the same in jax."""


def load_recipe(name: str) -> Rules:
    """Read the rules of a recipe, a file that comes with penstock. Blocking.

    Args:
        name: One of `RECIPES`, such as `"llama"`.

    Raises:
        SpecError: If there is none of that name.
    """
    if name not in RECIPES:
        raise SpecError(f"there is no recipe {name!r}; {hint_at(name, sorted(RECIPES))}")

    return load_rules(os.path.join(os.path.dirname(__file__), "recipes", f"{name}.toml"))


def load_rules(path: str | os.PathLike[str]) -> Rules:
    """Read rules from a file of TOML: tables `[[rule]]`, and `rest`. Blocking.

    Args:
        path: Of the file, on this machine.

    Raises:
        SpecError: If it is no file, no TOML, or a table in it is no rule.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise SpecError(f"{name}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{name}: is no TOML: {error}") from error

    return parse_rules(document, name)
