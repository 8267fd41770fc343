"""Requests served together: texts, refilled slots, the law, and the accounting."""

import dataclasses
import functools
import inspect
import itertools

import jax
import numpy as np
import pytest

from specjax import serving, testing
from specjax.certify import engine
from specjax.drafters.none import NoDrafter
from specjax.generate import Model, Weights, generate
from specjax.sampling import GREEDY, Sampling
from specjax.scheduler import Delayed, Prefix, Threshold
from specjax.serving import Batch, Request, serve
from specjax.tree import Tree

KEY = jax.random.key(5)
PROMPTS = ((1, 2, 3), (4,), (5, 6), (7, 8, 9, 10), (2, 2), (11, 3))
REQUESTS = [
    Request(prompt, max_new_tokens=n, seed=i)
    for i, (prompt, n) in enumerate(zip(PROMPTS, (9, 12, 1, 5, 12, 7), strict=True))
]
PASSES = tuple(1 / (4 + n) for n in range(1, 20))
STEEP = tuple(1 / (7 + n) for n in range(1, 25))
SHORT = {Prefix: (STEEP,), Delayed: (STEEP, 5)}


@functools.cache
def models(gamma=4):
    small = {"num_layers": 2, "width": 8, "num_heads": 2, "num_kv_heads": 1}
    target, params = testing.tiny_target(head_width=4, mlp_width=8, **small)
    drafter, weights = testing.tiny_drafter("dspark", target, params, gamma=gamma)
    return target, drafter, Weights(target=params, drafter=testing.perturb(weights))


def model(policy=None, sampling=GREEDY):
    target, drafter, _ = models()
    return Model(target, drafter, sampling, stop_ids=(5,), policy=policy)


def batch(policy=None, sampling=GREEDY, slots=2, **options):
    """A server whose clock counts how often it is read."""
    ticks = itertools.count()
    clock = lambda: float(next(ticks))
    options = {"max_new_tokens": 12, "prompt_width": 4, "key": KEY} | options
    return Batch(model(policy, sampling), models()[2], slots, clock=clock, **options)


@functools.cache
def alone(policy=None, sampling=GREEDY):
    """The same requests through the engine, each without a neighbour to wait for."""
    options = {"max_new_tokens": 12, "key": KEY, "width": 4}
    return generate(model(policy, sampling), models()[2], PROMPTS, **options)


def check_texts(report, right):
    """Texts and the drafts accepted in every round are those of `generate`."""
    assert len(report.served) == len(REQUESTS)
    for one in report.served:
        i, n = one.request.seed, one.request.max_new_tokens
        assert one.tokens == right.tokens[i][:n]
        assert one.num_tokens == len(one.tokens)
        accepted = right.trace.num_accepted[i, : len(one.accepted)].tolist()
        assert one.accepted[:-1] == accepted[:-1]  # the last round may be cut


STATIC, SURE = None, Threshold(0.6)


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [
        pytest.param(SURE, Sampling(), marks=pytest.mark.slow),
        pytest.param(SURE, GREEDY, marks=pytest.mark.slow),
        pytest.param(STATIC, Sampling(), marks=pytest.mark.slow),
        (STATIC, GREEDY),
    ],
    ids=["stopped-sampled", "stopped-greedy", "static-sampled", "static-greedy"],
)
def test_a_text_is_that_of_the_request_alone(policy, sampling):
    made = batch(policy, sampling)
    report = serve(made, REQUESTS)
    check_texts(report, alone(policy, sampling))
    widths = {r.paid // made.slots for r in report.rounds}
    assert len(widths) > 1 if policy else widths == {5}


@pytest.mark.parametrize(
    "policy",
    [Prefix(PASSES), pytest.param(Delayed(PASSES, first=3), marks=pytest.mark.slow)],
    ids=["prefix", "delayed"],
)
def test_a_policy_that_looks_at_all_rows_leaves_greedy_texts_alone(policy):
    for one in serve(batch(policy, widths=(2, 5)), REQUESTS).served:
        assert one.tokens == alone().tokens[one.request.seed][: one.num_tokens]


@pytest.mark.slow
@pytest.mark.parametrize("topology", [None, Tree.full(2, 1)], ids=["none", "tree"])
def test_trees_and_plain_decoding_are_served_too(topology):
    target, _, weights = models()
    drafter = NoDrafter()
    if topology is not None:
        shape = {"gamma": 2, "topology": topology}
        drafter, params = testing.tiny_drafter(
            "medusa", target, weights.target, **shape
        )
        weights = dataclasses.replace(weights, drafter=testing.perturb(params))
    chosen = Model(target, drafter, GREEDY, stop_ids=(5,))
    made = Batch(chosen, weights, 2, max_new_tokens=12, prompt_width=4, key=KEY)
    for one in serve(made, REQUESTS).served:
        assert one.tokens == alone().tokens[one.request.seed][: one.num_tokens]


@pytest.mark.parametrize(
    "field", [pytest.param("state", marks=pytest.mark.slow), "cache", "keys"]
)
def test_a_slot_that_keeps_something_of_its_last_request_is_noticed(field, monkeypatch):
    """Planted bugs: a part of the row that is not put into the slot."""
    fewer = tuple(name for name in serving.PER_ROW if name != field)
    made, place = batch(SURE, Sampling()), inspect.unwrap(serving.place)
    monkeypatch.setattr(serving, "PER_ROW", fewer)
    monkeypatch.setattr(serving, "place", jax.jit(lambda *args: place(*args)))
    with pytest.raises(AssertionError):
        check_texts(serve(made, REQUESTS), alone(SURE, Sampling()))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Prefix, Delayed])
def test_rows_that_compete_for_a_budget_keep_the_law_of_each_and_of_both(policy):
    """Sampled: neighbouring requests' first tokens against the enumerated joint."""
    kit = engine.kit("dspark")
    made = Batch(
        Model(kit.target, kit.drafter, Sampling(), policy=policy(*SHORT[policy])),
        Weights(kit.params, kit.weights),
        slots=8,
        max_new_tokens=engine.NUM_TOKENS + 1,
        prompt_width=8,
    )
    asked = [Request(tuple(engine.PROMPT), 5, seed=i) for i in range(1024)]
    report = serve(made, asked)
    budgets = {int(r.verified.sum()) for r in report.rounds}
    assert len(budgets) > 3
    served = sorted(report.served, key=lambda s: s.request.seed)
    texts = np.array([s.tokens[: engine.NUM_TOKENS] for s in served])
    law = engine.joint(Sampling(), engine.NUM_TOKENS)
    counts = testing.count(texts, engine.VOCAB)
    assert testing.chi_square(counts, law) > testing.FALSE_ALARM
    two = law.sum(axis=(2, 3))
    pairs = np.concatenate([texts[0::2, :2], texts[1::2, :2]], axis=1)
    counts = testing.count(pairs, engine.VOCAB)
    assert testing.chi_square(counts, np.multiply.outer(two, two)) > testing.FALSE_ALARM


def test_users_send_their_next_request_when_the_last_has_ended():
    report = serve(batch(slots=3), REQUESTS, users=2)
    assert max(int(r.live.sum()) for r in report.rounds) == 2
    begun = sorted(s.begun for s in report.served)
    ends = sorted(s.end for s in report.served)
    assert begun[:2] == [0.0, begun[1]] and all(
        s.arrival in (0.0, *ends) for s in report.served
    )


def test_an_idle_server_waits_for_the_next_arrival():
    late = [dataclasses.replace(REQUESTS[0], arrival=t) for t in (0.0, 500.0)]
    first, second = serve(batch(), late).served
    assert second.begun == 500.0 and second.arrival == 500.0
    assert second.end - second.begun == first.end - first.begun


def test_a_tree_is_served_whole_and_only_chains_are_narrowed():
    with pytest.raises(ValueError, match="end with the draft's 5 nodes"):
        batch(widths=(2, 4))
    with pytest.raises(ValueError, match="asks for 13 tokens of a batch made for 12"):
        batch().begin(0, Request((1,), 13))
    with pytest.raises(ValueError, match="users >= 1"):
        serve(batch(), REQUESTS, users=0)


def test_a_summary_by_hand():
    """Two requests, one that waited; a round of one and a round of both."""

    def happened(live, verified, committed):
        live, verified, committed = map(np.array, (live, verified, committed))
        done = np.zeros(2, bool)
        return serving.Round(1.0, live, verified, 10, committed - 1, committed, done)

    asked = Request((1,), 9)
    rounds = [
        happened([True, False], [5, 0], [3, 0]),
        happened([True, True], [3, 4], [1, 2]),
    ]
    served = [
        serving.Served(asked, 0.0, 0.0, first=1.0, end=5.0, num_tokens=5),
        serving.Served(asked, 1.0, 3.0, first=4.0, end=5.0, num_tokens=3),
    ]
    found = serving.summary(serving.Report(served, rounds, [2.0, 5.0]))
    assert found["throughput"] == (1 + 3) / 3  # until the second left the queue
    assert found["user_speed"] == (4 + 2) / (4 + 1) == 1 / found["per_token"]
    assert found["first_token"] == (1 + 3) / 2
    assert found["first_token_95"] == pytest.approx(2.9)
    assert found["tau"] == 6 / 3 and found["live"] == 3 / 2
    assert (found["verified"], found["paid"]) == (12 / 3, 20 / 3)


def test_a_draft_that_its_own_law_excludes_is_an_error(monkeypatch):
    made = batch()
    made.live[:] = True
    counts = np.ones(2, int), np.ones(2, int), np.zeros(2, int)
    spoilt = lambda draft, width: [*counts, np.array([True, False])]
    monkeypatch.setattr(made, "_settle", spoilt)
    with pytest.raises(ValueError, match="its own law gives probability 0"):
        made.round()
