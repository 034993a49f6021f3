"""Videos of moving digits with captions, which are made on the fly: data of the first recipe.

    seven left     the digit 7 moves to the left, by a pixel in every frame

The digits are those of scikit-learn, 8 x 8 pixels; a caption is two words, and each word is a fixed
random vector.
"""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Float32

from startrail_jax.errors import InputError
from trainer.dit.images import DIGITS, images_of_digits
from trainer.dit.wan.batches import Clip
from trainer.dit.wan.config import WanTrainConfig

STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Direction -> rows and columns by which a digit moves."""
COUNT = 8192
"""Number of different videos."""
PIXELS = 8


class MovingDigits:
    """The videos by their number."""

    def __init__(self, config: WanTrainConfig) -> None:
        """Loads the digits."""
        model, (frames, height, width) = config.model, config.size
        least = PIXELS + frames - 1
        if model.channels != 1 or min(height, width) < least or model.first_frame != "none":
            raise InputError(
                "Without --data.path, data are moving digits, which need model.channels=1, "
                f"model.first_frame='none' and size={frames} {least} {least} or more; got "
                f"channels={model.channels}, first_frame={model.first_frame!r}, size="
                f"{' '.join(map(str, config.size))}. Use those, or give --data.path."
            )
        self._images, self._labels = images_of_digits("moving digits")
        self._size, self._text_dim = config.size, model.text_dim

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Clip:
        rng = np.random.default_rng((0, number))
        image = int(rng.integers(len(self._images)))
        direction = list(STEPS)[rng.integers(len(STEPS))]
        frames, *canvas = self._size
        latent = np.full((*self._size, 1), -1, np.float32)
        # Where the digit is in the first frame, so that it never leaves the canvas.
        moved = [step * (frames - 1) for step in STEPS[direction]]
        start = [
            rng.integers(max(0, -way), side - PIXELS - max(0, way) + 1)
            for way, side in zip(moved, canvas, strict=True)
        ]
        for frame in range(frames):
            top, left = (a + frame * b for a, b in zip(start, STEPS[direction], strict=True))
            latent[frame, top : top + PIXELS, left : left + PIXELS, 0] = self._images[image]
        caption = f"{DIGITS[self._labels[image]]} {direction}"
        return Clip(latent, embedded(caption, self._text_dim))


def embedded(caption: str, text_dim: int) -> Float32[np.ndarray, "S D"]:
    """A caption of moving digits, a vector for each word; no words are one zero."""
    words = caption.split()
    unknown = [word for word in words if word not in (*DIGITS, *STEPS)]
    if unknown:
        raise InputError(
            f"A caption of moving digits must be of the words {' '.join((*DIGITS, *STEPS))}; got "
            f"{unknown[0]!r}. Use for example 'seven left'."
        )
    seeds = [hashlib.sha256(word.encode()).digest() for word in words]
    vectors = [np.random.default_rng([*seed]).standard_normal(text_dim) for seed in seeds]
    return np.array(vectors or [np.zeros(text_dim)], np.float32)
