"""The draft model against recorded numbers and a loop-by-loop transcription.

Recorded with `transformers` in float64 on closed-form weights: target delta 0, draft
delta 0.02, 0.05 or 0.1.
"""

import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.base import Batch
from specjax.drafters.draft_model import DraftModel
from specjax.generate import Model, Weights, advance, finish, generate, start
from specjax.sampling import GREEDY, Sampling
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=32,
    width=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_width=4,
    mlp_width=12,
    norm_eps=1e-6,
    max_positions=128,
)
PROMPT = [3, 7, 1, 9]
GREEDY_TEXT = [5, 27, 31, 7, 11, 6, 19, 4, 8, 21, 16, 20, 24, 9, 13, 26]
# Slots in the target's cache -> draft logits of ids 0 to 3 at the round's first token.
FIRST_LOGITS = {
    4: (1.722215, 0.805291, -0.473103, -1.539136),
    6: (0.481334, -0.669410, -1.519676, -1.687808),
    7: (0.408937, 1.068551, 1.248526, 0.868077),
    11: (1.412688, 0.230958, -1.054442, -1.866536),  # after a full accept
    15: (-1.309050, -1.555903, -1.104361, -0.157107),  # after a full accept
    17: (-1.808150, -0.730877, 0.674464, 1.777058),
}


@functools.cache
def tensors(delta):
    return golden.llama(golden.counted(0, delta=delta), CONFIG)


@functools.cache
def models(delta):
    weights = [golden.to_jax(tensors(d)) for d in (0.0, delta)]
    return Model(Llama(CONFIG), DraftModel(CONFIG, gamma=3), GREEDY), Weights(*weights)


def rounds(delta):
    return generate(*models(delta), [PROMPT], max_new_tokens=30)


def test_logits_are_those_recorded_for_both_models():
    target, drafter = Llama(CONFIG), DraftModel(CONFIG)
    _, weights = models(0.05)
    text = jnp.array([PROMPT])
    ours = target.logits(weights.target, target(weights.target, text).hidden)
    right = [-1.059242, -1.009888, -0.507228, 0.223111]
    np.testing.assert_allclose(ours[0, -1, :4], right, atol=2e-5)
    ours, _ = drafter.forward(weights.drafter, text)
    right = [-0.730829, -1.003723, -0.826078, -0.277633]
    np.testing.assert_allclose(ours[0, -1, :4], right, atol=2e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_stack_equals_its_transcription(qk_norm):
    config = TransformerConfig(
        vocab_size=11,
        width=12,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_width=6,
        mlp_width=10,
        qk_norm=qk_norm,
    )
    params = golden.llama(golden.counted(5, quadratic=0.3), config)
    text = [3, 1, 4, 1, 5, 9]
    states, logits = golden.decode(params, config, text)
    target, weights = Llama(config), golden.to_jax(params)
    out = target(weights, jnp.array([text]), taps=(0, 1, 2))
    right = np.concatenate(states, axis=1)
    np.testing.assert_allclose(out.features[0], right, atol=2e-5)
    np.testing.assert_allclose(target.logits(weights, out.hidden)[0], logits, atol=2e-5)


def test_greedy_text_and_accepted_counts_are_those_recorded():
    run = rounds(0.02)
    assert run.tokens[0][:16] == GREEDY_TEXT
    assert run.trace.num_accepted[0, :6].tolist() == [1, 0, 3, 3, 1, 3]


def test_the_first_pass_of_each_round_sees_every_committed_token():
    """The text would not show a missing d_G: these logits do, at 11 slots and on."""
    model, weights = models(0.02)
    shared = model.target.shared(weights.target)
    draft = jax.jit(model.drafter.draft, static_argnums=4)
    progress = start(model, weights, [PROMPT], max_new_tokens=30)
    seen = {}
    for _ in range(len(FIRST_LOGITS)):
        args = weights.drafter, shared, progress.state, progress.anchor
        proposal, _ = draft(*args, Sampling(), jax.random.split(jax.random.key(0), 1))
        seen[int(progress.cache.length[0])] = np.log(proposal.probs[0, 0, :4])
        progress = advance(model, weights, progress, jnp.asarray(1))
    assert list(seen) == list(FIRST_LOGITS)
    for slots, right in FIRST_LOGITS.items():
        difference = np.subtract(seen[slots], right)  # the softmax's constant
        np.testing.assert_allclose(difference, difference[0], atol=3e-5)
    assert finish(model, progress).tokens[0][:16] == GREEDY_TEXT


def test_a_draft_that_is_never_right_still_gives_the_targets_text():
    run = rounds(0.1)
    assert not np.any(run.trace.num_accepted[:, :15])
    assert run.tokens[0][:16] == GREEDY_TEXT


def test_the_target_as_its_own_draft_is_always_accepted():
    """Every round is a full accept, so every round needs the last token fed again."""
    run = generate(*models(0.0), [PROMPT], max_new_tokens=33)
    assert run.trace.num_accepted.tolist() == [[3] * 8]
    assert run.tokens[0][:16] == GREEDY_TEXT


@pytest.mark.slow
def test_the_target_as_its_own_draft_is_always_accepted_under_sampling():
    model, weights = models(0.0)
    model = Model(model.target, model.drafter, Sampling(0.8, top_p=0.9))
    run = generate(model, weights, [PROMPT] * 8, max_new_tokens=17)
    assert np.mean(run.trace.num_accepted == 3) > 0.95  # but for rounding of p / q


@pytest.mark.parametrize("distill", ["ce", "fkl", "rkl", "jsd", "tv"])
def test_losses_equal_their_definitions(distill):
    target, (_, weights) = Llama(CONFIG), models(0.05)
    text = [*PROMPT, *GREEDY_TEXT[:5]]
    hidden = target(weights.target, jnp.array([text])).hidden
    mask = jnp.arange(9)[None] >= 4
    batch = Batch(jnp.array([text]), mask, hidden[..., :0], hidden)
    drafter = DraftModel(CONFIG, distill=distill)
    ours, _ = jax.jit(drafter.loss)(
        weights.drafter, target.shared(weights.target), batch, jax.random.key(0)
    )
    laws = []
    for delta in (0.0, 0.05):
        z = golden.decode(tensors(delta), CONFIG, text)[1]
        laws.append(np.exp(z) / np.exp(z).sum(1, keepdims=True))
    values = []
    for t in range(3, 8):  # the positions that predict tokens 4 to 8
        p, q, m = laws[0][t], laws[1][t], (laws[0][t] + laws[1][t]) / 2
        kl = lambda a, b: np.sum(a * np.log(a / b))
        values.append(
            {
                "ce": -np.log(q[text[t + 1]]),
                "fkl": kl(p, q),
                "rkl": kl(q, p),
                "jsd": (kl(p, m) + kl(q, m)) / 2,
                "tv": 1 - np.minimum(p, q).sum(),
            }[distill]
        )
    assert float(ours) == pytest.approx(np.mean(values), abs=2e-5)


def test_a_draft_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="gamma >= 1, got 0"):
        DraftModel(CONFIG, gamma=0)


def test_another_vocabulary_is_refused():
    target = Llama(CONFIG)
    shared = target.shared(models(0.0)[1].target)
    other = DraftModel(TransformerConfig(**vars(CONFIG) | {"vocab_size": 16}))
    with pytest.raises(ValueError, match="16 ids, the target 32"):
        other.init(jax.random.key(0), shared)
