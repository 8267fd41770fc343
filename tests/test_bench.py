"""What the bench says of a drafter's text: the same, a tie of the target, or other."""

import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from scripted import Reciter

from specjax import figures
from specjax.bench import Bench, Settings
from specjax.targets import Pretrained
from specjax.tree import Tree

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


class Timed(Bench):
    """Rounds of known length, on a machine that is three times slower every repeat."""

    def __init__(self):
        self.settings = Settings(timing_repeats=2)
        self.tasks = {"all": [[1]]}
        self.pretrained = mock.Mock()
        self.verify_ratios = {}
        self.calls = []

    def model(self, drafter, temperature):
        return drafter

    def seconds_per_round(self, model, weights, prompts):
        kind = type(model).__name__
        self.calls.append(kind)
        repeat = self.calls.count("NoDrafter")
        return {"NoDrafter": 1.0, "FreeDrafter": 2.0}.get(kind, 2.5) * 3.0**repeat


def test_the_verify_pass_is_timed_once_a_tree_and_plain_rounds_beside_all():
    bench, drafter = Timed(), types.SimpleNamespace(tree=Tree.chain(3))
    first = bench.costs(drafter, None, 0.0)
    assert (first.verify_ratio, first.draft_cost) == pytest.approx((2.0, 0.5))
    assert bench.calls.count("FreeDrafter") == 3
    second = bench.costs(drafter, None, 0.0)
    assert (second.verify_ratio, second.draft_cost) == pytest.approx((2.0, 0.5))
    assert bench.calls.count("FreeDrafter") == 3
    assert bench.calls.count("NoDrafter") == 6
    bench.costs(drafter, None, 1.0)  # its laws are drawn otherwise
    assert bench.calls.count("FreeDrafter") == 6


def test_panels_of_all_temperatures_have_the_same_axes(tmp_path, monkeypatch):
    row = {"drafter": "a", "task": "code", "alpha_by_position": [0.5, 0.4]}
    values = ("tau", "tau_low", "tau_high", "speedup_measured", "speedup_predicted")
    rows = [
        row | {"temperature": t} | dict.fromkeys(values, tau)
        for t, tau in ((0.0, 3.0), (1.0, 1.5))
    ]
    plt = figures.pyplot()
    monkeypatch.setattr(plt, "close", lambda fig: None)
    figures.bench(rows, "here", tmp_path / "a.png")
    limits = [(axis.get_xlim(), axis.get_ylim()) for axis in plt.gcf().axes]
    monkeypatch.undo()
    plt.close("all")
    assert len(limits) == 6 and limits[::2] == limits[1::2]
    assert limits[0][1][1] > 3
