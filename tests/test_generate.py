"""The engine: ends of a text, batches, limits, accounting and what is compiled."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import recite

from specjax import metrics, testing
from specjax.drafters.medusa import Medusa
from specjax.generate import (
    Model,
    Weights,
    advance,
    autoregressive,
    check,
    generate,
    start,
    stream,
)
from specjax.sampling import GREEDY, Sampling

EOS = 0
PROMPT = [1, 1]
STORY = (1, 1, 4, 5, 7, EOS, 9, 9, 9, 9, 9, 9)  # prompt, first token, 5, 7, end
LONG = (1, 1, *([4, 5, 6, 7] * 15))


def tell(script, *, max_new_tokens=8, prompts=(PROMPT,), **fields):
    model, weights = recite(script, **fields)
    return generate(model, weights, prompts, max_new_tokens=max_new_tokens)


def round_of(run, row=0):
    """Accepted and committed of each round of a row."""
    both = zip(
        run.trace.num_accepted[row].tolist(),
        run.trace.num_committed[row].tolist(),
        strict=True,
    )
    return [pair for pair in both if pair[1]]


@pytest.mark.parametrize(
    ("script", "wrong", "rounds"),
    [
        (STORY, (), [(3, 3)]),  # drafted
        (STORY, (5,), [(2, 3)]),  # the bonus after a rejection
        ((1, 1, 4, 5, 6, 7, 8, EOS, 9, 9), (), [(4, 5)]),  # the bonus of a full accept
        ((1, 1, 4, EOS, 9, 9, 9, 9), (), [(1, 1)]),  # the first draft
        ((1, 1, 4, EOS, 9, 9, 9, 9), (3,), [(0, 1)]),  # the only bonus
        ((1, 1, EOS, 9, 9, 9, 9, 9), (), []),  # the prefill's own token
    ],
)
def test_a_stop_id_ends_the_text_wherever_it_falls(script, wrong, rounds):
    run, end = tell(script, wrong=wrong), script.index(EOS)
    assert run.tokens == [list(script[2 : end + 1])]
    assert run.finish_reasons == ["eos"]
    assert round_of(run) == rounds


def test_a_text_cut_by_max_new_tokens_says_so():
    run = tell(STORY, max_new_tokens=2)
    assert run.tokens == [[4, 5]] and run.finish_reasons == ["length"]
    assert round_of(run) == [(1, 1)]


def test_a_stop_id_that_is_also_the_last_token_allowed_counts_as_the_end():
    run = tell(STORY, max_new_tokens=4)
    assert run.tokens == [[4, 5, 7, EOS]] and run.finish_reasons == ["eos"]


def test_without_stop_ids_nothing_ends_the_text_but_its_length():
    run = tell(STORY, stop_ids=(), max_new_tokens=7)
    assert run.tokens == [list(STORY[2:9])] and run.finish_reasons == ["length"]


def test_rows_stop_on_their_own():
    """A longer prompt starts later in the same script, so its end comes sooner."""
    prompts = [[1], [1, 1, 4], [1, 1, 4, 5, 7]]
    run = tell(STORY, prompts=prompts, max_new_tokens=3)
    assert run.tokens == [[1, 4, 5], [5, 7, EOS], [EOS]]
    assert run.finish_reasons == ["length", "eos", "eos"]


@pytest.mark.parametrize("length", [2, 9, 15])
def test_a_text_never_passes_the_targets_last_position(length):
    """C17: 16 positions in all, whatever is asked for."""
    run = tell(
        LONG, prompts=[[1] * length, PROMPT], max_new_tokens=30, max_positions=16
    )
    assert [len(t) for t in run.tokens] == [16 - length, 14]
    assert run.tokens[0] == list(LONG[length:16])
    assert run.finish_reasons == ["length", "length"]


def test_a_perfect_drafter_is_accepted_everywhere_and_fills_every_round():
    run = tell(LONG, max_new_tokens=21)
    assert metrics.tau(run.trace) == 5
    assert metrics.alpha_by_position(run.trace) == [1.0] * 4
    assert round_of(run) == [(4, 5)] * 4


def test_a_drafter_that_is_always_wrong_costs_rounds_but_no_text():
    run = tell(LONG, max_new_tokens=9, wrong=tuple(range(60)))
    assert run.tokens == [list(LONG[2:11])]
    assert round_of(run) == [(0, 1)] * 8
    assert metrics.alpha_by_position(run.trace)[0] == 0


def test_tokens_are_the_first_and_those_of_the_rounds():
    run = tell(LONG, prompts=[[1], PROMPT, [1] * 5], max_new_tokens=13, wrong=(9, 12))
    committed = run.trace.num_committed.sum(axis=1)
    assert (committed + 1).tolist() == [len(t) for t in run.tokens] == [13] * 3
    survival = metrics.survival_by_position(run.trace)
    assert metrics.tau(run.trace) <= 1 + sum(survival) + 1e-9


def test_a_draft_that_its_own_law_excludes_is_an_error():
    with pytest.raises(ValueError, match="Prompter proposed a token"):
        tell(STORY, honest=False, sampling=Sampling())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[]]}, "at least one token"),
        ({"prompts": []}, "at least one token"),
        ({"prompts": [[1, 12]]}, "prompt ids span 1 to 12; the target knows 0 to 11"),
        ({"prompts": [[1] * 64]}, "64 tokens leaves no room in the target's 64"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"cache_size": 40}, r"43 > S=40. Raise cache_size"),
        ({"seeds": [1, 2]}, "2 seeds for 1 prompts"),
    ],
)
def test_a_bad_request_is_refused_with_its_values(change, message):
    model, weights = recite(LONG)
    request = {"prompts": [[1] * 30], "max_new_tokens": 8} | change
    with pytest.raises(ValueError, match=message):
        start(model, weights, request.pop("prompts"), **request)


@functools.cache
def tiny(name="medusa", sampling=Sampling(), **fields):  # noqa: B008
    target, params = testing.tiny_target()
    drafter, weights = testing.tiny_drafter(name, target, params, **fields)
    model = Model(target, drafter, sampling, stop_ids=(5,))
    return model, Weights(target=params, drafter=testing.perturb(weights))


PROMPTS = [[3, 7, 1, 9], [2], [8, 8, 8, 1, 2, 3, 4]]


def test_a_rows_text_depends_on_its_seed_and_prompt_alone():
    """Ragged prompts in one batch, permuted, and one by one: the same sampled texts."""
    options = {"max_new_tokens": 12, "key": jax.random.key(5)}
    together = generate(*tiny(), PROMPTS, seeds=[7, 8, 9], **options)
    turned = generate(*tiny(), PROMPTS[::-1], seeds=[9, 8, 7], **options)
    assert together.tokens == turned.tokens[::-1]
    for row, (prompt, seed) in enumerate(zip(PROMPTS, [7, 8, 9], strict=True)):
        alone = generate(*tiny(), [prompt], seeds=[seed], **options)
        assert alone.tokens == [together.tokens[row]]


def test_other_seeds_give_other_texts():
    options = {"max_new_tokens": 12, "key": jax.random.key(5)}
    run = generate(*tiny(), [[3, 7]] * 3, seeds=[1, 2, 1], **options)
    assert run.tokens[0] == run.tokens[2] != run.tokens[1]


def test_streaming_ends_with_what_generate_gives():
    options = {"max_new_tokens": 12, "key": jax.random.key(5)}
    runs = list(stream(*tiny(), PROMPTS, **options))
    whole = generate(*tiny(), PROMPTS, **options)
    assert runs[-1].tokens == whole.tokens
    assert runs[-1].finish_reasons == whole.finish_reasons
    assert "running" in runs[0].finish_reasons
    for before, after in itertools.pairwise(runs):
        for old, new in zip(before.tokens, after.tokens, strict=True):
            assert new[: len(old)] == old


def test_rounds_of_any_number_share_one_compiled_program():
    options = {"max_new_tokens": 12, "key": jax.random.key(5)}
    list(stream(*tiny(), PROMPTS, **options))
    size = advance._cache_size()
    list(stream(*tiny(), PROMPTS, rounds=3, **options))
    generate(*tiny(), [[1], [2, 3], [4]], **options)
    assert advance._cache_size() == size


def test_the_loop_never_calls_the_host_and_its_carry_is_donated():
    model, weights = tiny()
    progress = start(model, weights, PROMPTS, max_new_tokens=12)
    text = advance.lower(model, weights, progress, jnp.asarray(2)).as_text()
    assert "callback" not in text and "while" in text
    advance(model, weights, progress, jnp.asarray(2))
    assert all(k.is_deleted() for k in progress.cache.k)


def test_the_baseline_is_the_same_run_without_drafts():
    model, weights = tiny()
    run = generate(autoregressive(model), weights, PROMPTS, max_new_tokens=12)
    assert run.trace.depth == 0 and metrics.tau(run.trace) == 1
    assert [len(t) for t in run.tokens] == (
        np.asarray(run.trace.num_committed).sum(1) + 1
    ).tolist()


@pytest.mark.parametrize(("tap", "fits"), [(5, False), (-6, False), (4, True)])
def test_a_drafter_of_a_deeper_target_is_refused(tap, fits):
    class Deep(Medusa):
        taps = (tap,)

    target, _ = testing.tiny_target(num_layers=4)
    model = Model(target, Deep(gamma=2, num_heads=2), GREEDY)
    deep = pytest.raises(ValueError, match=rf"reads states \[{tap}\] of a target")
    with contextlib.nullcontext() if fits else deep:
        check(model)
