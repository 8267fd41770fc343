"""A training of a second: what the tests of the trainer and its files share."""

import jax
import numpy as np

from specjax import targets, testing
from specjax.corpus import Texts
from specjax.drafters.medusa import Medusa
from specjax.training import TrainConfig

DRAFTER = Medusa(gamma=2, num_heads=2, share_head=True)
# 10 texts in batches of 2: an epoch ends at step 5.
CONFIG = TrainConfig(steps=10, batch_size=2, log_every=1, save_every=3)
LEARNED = slice(3, 14)  # of 16 tokens


def make_texts(seed=0, rows=10):
    tokens = np.random.default_rng(seed).integers(0, 24, (rows, 16), np.int32)
    mask = np.zeros(tokens.shape, bool)
    mask[:, LEARNED] = True
    return Texts(tokens, mask)


TEXTS = make_texts()


def make_target():
    target, params = testing.tiny_target(num_layers=2)
    return targets.Pretrained("toy", target, params, None, ())


class Log(dict):
    """Metrics by step; seconds left out."""

    def __call__(self, step, values):
        assert values.pop("tokens_per_s") >= 0
        self[step] = values


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
