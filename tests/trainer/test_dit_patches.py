"""Patches: which number of a latent goes where, and the way back."""

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.dit.patches import patchify, unpatchify

pytestmark = pytest.mark.quick

SIZE, PATCH, CHANNELS = (6, 10, 21), (3, 2, 7), 5
GRID = (2, 5, 3)


def make_latent(*batch):
    return np.arange(np.prod((*batch, *SIZE, CHANNELS))).reshape(*batch, *SIZE, CHANNELS)


def test_patchify_puts_each_number_into_its_patch():
    latent = make_latent(2)
    patches = patchify(latent, PATCH)
    assert patches.shape == (2, 30, 42 * CHANNELS)
    for token, position in enumerate(np.ndindex(GRID)):
        frame, row, column = (slice(n * m, n * m + m) for n, m in zip(position, PATCH, strict=True))
        expected = latent[:, frame, row, column].reshape(2, -1)
        np.testing.assert_array_equal(patches[:, token], expected)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_unpatchify_is_the_way_back(library, batch):
    latent = library.asarray(make_latent(*batch))
    back = unpatchify(patchify(latent, PATCH), SIZE, PATCH)
    assert type(back) is type(latent)
    np.testing.assert_array_equal(back, latent)
