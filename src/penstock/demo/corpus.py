"""Text as numbers, and the batch of every step."""

from __future__ import annotations

__all__ = ("Corpus",)

from typing import final

import numpy as np
import numpy.typing as npt

from penstock.demo.model import ModelSize


@final
class Corpus:
    """The characters of a text, numbered in the order of their code points.

    Args:
        text: Longer than a model's context.
    """

    __slots__ = ("_tokens", "vocabulary")

    def __init__(self, text: str) -> None:
        number_of = {character: at for at, character in enumerate(sorted(set(text)))}
        self.vocabulary = len(number_of)
        self._tokens = np.array([number_of[character] for character in text], np.int32)

    def batch(self, seed: int, step: int, size: ModelSize) -> npt.NDArray[np.int32]:
        """Return `(batch, context + 1)` tokens, which depend on the arguments and on nothing else.

        Raises:
            ValueError: If the text is too short for the model.
        """
        last = len(self._tokens) - size.context - 1
        if last < 0:
            raise ValueError(f"the text has {len(self._tokens)} characters; {size.context + 1} are needed")

        starts = np.random.default_rng((seed, step)).integers(0, last, size.batch, endpoint=True)
        return np.take(self._tokens, starts[:, None] + np.arange(size.context + 1))
