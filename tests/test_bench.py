"""What the bench says of a drafter's text: the same, a tie of the target, or other."""

import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from scripted import Reciter

from specjax.bench import Bench, Settings
from specjax.targets import Pretrained

LOGITS = np.array([0.0, 5.0, 4.9995, -3.0], np.float32)  # 1 and 2 tie, 3 is the least


class Fixed(Reciter):
    """A target with one law for every place."""

    def __call__(self, params, tokens):
        shape = (*tokens.shape, len(LOGITS))
        return types.SimpleNamespace(hidden=jnp.broadcast_to(LOGITS, shape))

    def logits(self, params, hidden):
        return hidden


@pytest.mark.parametrize(
    ("plain", "drafted", "same"),
    [
        ([[1, 1], [1]], [[1, 1], [1]], True),
        ([[1, 1], [1]], [[1, 2], [2]], True),  # ties
        ([[1, 1], [1]], [[1, 1], [3]], False),  # the least likely for the likeliest
        ([[1, 3], [1]], [[1, 1], [1]], False),
        ([[1, 0], [1]], [[1, 3], [1]], False),
        ([[1, 1], [1]], [[1, 1], [1, 1]], False),  # an end that was missed
    ],
)
def test_texts_agree_only_where_they_are_equal_or_the_target_ties(plain, drafted, same):
    tokenizer = types.SimpleNamespace(chat=lambda messages: [0, 3])
    pretrained = mock.Mock(spec=Pretrained, target=Fixed(()), params={})
    pretrained.tokenizer = tokenizer
    bench = Bench(pretrained, {"chat": ["a", "b"]}, Settings(max_new_tokens=8))
    assert bench.same_text(plain, drafted, "chat") is same
