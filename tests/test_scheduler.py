"""Stopping drafts: test vectors, and the law of the text with every draw summed over.

The toy laws and their distances are recorded: another program enumerated the same.
"""

import dataclasses
import functools
import itertools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import scheduler, testing
from specjax.certify import engine
from specjax.generate import Model, Weights, generate
from specjax.sampling import GREEDY, Sampling
from specjax.scheduler import Delayed, Prefix, Threshold
from specjax.tree import Tree
from specjax.verify import PAD, Draft

prefix, capacity, top, below = (
    jax.jit(f)
    for f in (scheduler.prefix, scheduler.capacity, scheduler.top, scheduler.below)
)


def live(rows):
    return jnp.ones(rows, bool)


def array(x):
    return jnp.asarray(x, jnp.float32)


def slow_prefix(confidence, passes, is_live):
    """Algorithm 1 as written: a queue that holds one candidate a row."""
    rows = int(np.sum(is_live))
    a, lengths, tau, n = np.ones(len(confidence)), np.zeros(len(confidence), int), 0, 0
    best = rows * passes[rows - 1]
    while True:
        heads = [
            (-a[r] * confidence[r][lengths[r]], lengths[r], r)
            for r in range(len(confidence))
            if is_live[r] and lengths[r] < len(confidence[r])
        ]
        if not heads or (head := min(heads))[0] == 0:
            return lengths.tolist()
        _, k, r = head
        a[r] *= confidence[r][k]
        tau, n = tau + a[r], n + 1
        theta = (rows + tau) * passes[rows + n - 1]
        if theta <= best:
            return lengths.tolist()
        best, lengths[r] = theta, k + 1


C = [[0.9, 0.8, 0.5], [0.6, 0.7, 0.9]]
SMOOTH = [1 / (1 + 0.25 * n) for n in range(1, 9)]
STAIRS = [1, 0.5, 0.48, 0.30, 0.295, 0.29, 0.285, 0.28]  # over 1 to 8 tokens


@pytest.mark.parametrize(
    ("passes", "lengths", "most"), [(SMOOTH, [2, 1], 3), (STAIRS, [1, 0], 6)]
)
def test_lengths_are_those_recorded(passes, lengths, most):
    """On stairs the best budget lies behind a step that does not pay."""
    args = array(C), array(passes), live(2)
    assert prefix(*args).tolist() == lengths
    assert slow_prefix(C, passes, [True, True]) == lengths
    assert int(capacity(*args)) == most
    assert top(array(C), jnp.asarray(most), live(2)).sum() == most


@pytest.mark.parametrize(
    ("passes", "recorded"),
    [
        (SMOOTH, [1.3333, 1.6571, 1.81, 1.8756, 1.856]),
        (STAIRS, [1.0, 1.392, 1.086]),
    ],
)
def test_throughput_along_the_admissions_is_that_recorded(passes, recorded):
    a, _ = scheduler._ranked(array(C), live(2))
    theta = scheduler._throughput(a, array(passes), live(2))
    np.testing.assert_allclose(theta[: len(recorded)], recorded, atol=5e-5)
    if passes is STAIRS:  # what a search over all budgets would have found
        assert float(theta.max()) == pytest.approx(1.5058, abs=5e-5)


@pytest.mark.parametrize("seed", range(6))
def test_the_sort_equals_the_queue(seed):
    """Also with equal and zero confidences, and with rows that have ended."""
    rng = np.random.default_rng(seed)
    confidence = rng.choice([0.0, 0.5, 0.75, 0.9, 1.0], (5, 4))
    passes = 1 / (1 + 0.1 * np.arange(1, 26)) + 0.02 * rng.random(25)
    is_live = np.arange(5) != seed
    ours = prefix(array(confidence), array(passes), jnp.asarray(is_live))
    right = slow_prefix(confidence, np.float32(passes), is_live)
    assert ours.tolist() == right


def test_a_threshold_looks_at_each_confidence_by_itself():
    confidence = array([[0.6, 0.5, 0.4], [0.4, 0.9, 0.9], [0.5, 0.5, 0.5]])
    assert below(confidence, jnp.asarray(0.5)).tolist() == [2, 0, 3]


@pytest.mark.parametrize("count", [0, 1, 4, 99])
def test_top_admits_as_many_as_it_is_told(count):
    lengths = top(array(C), jnp.asarray(count), jnp.array([False, True]))
    assert lengths.tolist() == [0, min(count, 3)]


def test_two_rounds_pass_before_a_capacity_is_used():
    policy, confidence = Delayed(tuple(SMOOTH), first=1), array(C)
    found, state = [], policy.init()
    for scale in (1.0, 0.1, 0.1, 0.1):
        lengths, state = policy.plan(state, scale * confidence, live(2))
        found.append(int(lengths.sum()))
    assert found == [1, 1, 3, 0]


def test_a_draft_that_gains_nothing_is_not_verified():
    """On a tie, or where it cannot be accepted and a wider pass was timed as faster."""
    sure, hopeless = array([[1.0, 1.0]]), array([[0.0, 0.0]])
    tie, faster = array([1, 0.5, 0.25]), array([1, 1.1, 1.2])
    for args in ((sure, tie, live(1)), (hopeless, faster, live(1))):
        assert prefix(*args).tolist() == [0]
        assert int(capacity(*args)) == 0
    assert top(hopeless, jnp.asarray(2), live(1)).tolist() == [0]


def test_a_row_that_has_ended_takes_nothing_of_a_budget():
    draft = Draft(jnp.zeros((2, 3), jnp.int32), probs=None, confidence=array(C))
    policy, is_live = Delayed(tuple(SMOOTH), first=2), jnp.array([False, True])
    ours, _ = scheduler.stop(policy, policy.init(), draft, Tree.chain(3), is_live)
    assert np.sum(ours.tokens != PAD, axis=1).tolist() == [0, 2]


# Laws of toy models: functions of the tokens so far.


def key(text, seed):
    return sum(37 * (i + 1) * (x + 1) for i, x in enumerate(text)) + 1000 * seed


@functools.cache
def law(text, seed, tag, V):
    z = 4 * golden.hashed(key(text, seed) + tag, (V,))
    return np.exp(z) / np.exp(z).sum()


@functools.cache
def sure(text, seed):
    return 0.7 + 0.5 * golden.hashed(key(text, seed) + 3, (1,))[0]


class Toy:
    """A target and a drafter of one request, and Leviathan's rule without random."""

    def __init__(self, seed, V):
        self.seed, self.V = seed, V
        self.p = lambda text: law(text, seed, 1, V)
        self.q = lambda text: law(text, seed, 2, V)

    def drafts(self, text, gamma):
        """Every draft after `text`: tokens, probability, confidences."""
        for x in itertools.product(range(self.V), repeat=gamma):
            longer = [text + x[:k] for k in range(gamma)]
            chance = np.prod([self.q(t)[y] for t, y in zip(longer, x, strict=True)])
            yield x, chance, [sure(t, self.seed) for t in longer]

    def outcomes(self, text, drafted):
        """New texts that a verified draft leads to, each with its probability."""
        found, alive = [], 1.0
        for y in drafted:
            p, q = self.p(text), self.q(text)
            accept = min(1.0, p[y] / q[y])
            left = np.maximum(p - q, 0)
            if accept < 1:
                left = alive * (1 - accept) * left / left.sum()
                found += [((*text, z), w) for z, w in enumerate(left)]
            alive *= accept
            text = (*text, y)
        return found + [((*text, z), alive * w) for z, w in enumerate(self.p(text))]

    def continued(self, outcomes, length):
        """Law of the first tokens of texts that the target goes on with alone."""
        total = np.zeros((self.V,) * length)
        todo = list(outcomes)
        while todo:
            text, weight = todo.pop()
            if len(text) >= length:
                total[text[:length]] += weight
            else:
                todo += [((*text, z), weight * w) for z, w in enumerate(self.p(text))]
        return total

    def right(self, length):
        return self.continued([((), 1.0)], length)


def searched(confidence, passes, is_live):
    """The planted bug: the best budget over this round's own drafts."""
    return top(confidence, capacity(confidence, passes, is_live), is_live)


def ahead(confidence, passes, is_live):
    """The planted bug: a draft is judged by what follows it."""
    del passes, is_live
    seen = jnp.pad(confidence[:, 1:], ((0, 0), (0, 1)), constant_values=1.0)
    return below(seen, jnp.asarray(0.7))


CHOICES = {
    "prefix": prefix,
    "top 1": lambda c, passes, on: top(c, jnp.asarray(1), on),
    "top 2": lambda c, passes, on: top(c, jnp.asarray(2), on),
    "top 3": lambda c, passes, on: top(c, jnp.asarray(3), on),
    "threshold": lambda c, passes, on: below(c, jnp.asarray(0.5)),
    "threshold .7": lambda c, passes, on: below(c, jnp.asarray(0.7)),
    "search": searched,
    "ahead": ahead,
}


def distance_of_one(choice):
    """Largest error of the law of two tokens, V = 3, three drafts, and the lengths."""
    toy, passes = Toy(3, 3), array([1, 0.62, 0.48, 0.45])
    total, lengths = np.zeros((3, 3)), set()
    for x, chance, confidence in toy.drafts((), 3):
        n = int(choice(array([confidence]), passes, live(1))[0])
        lengths.add(n)
        total += chance * toy.continued(toy.outcomes((), x[:n]), 2)
    return np.abs(total - toy.right(2)).max(), lengths


def distance_of_two(choice):
    """Of the joint law of two requests, V = 2, two drafts each."""
    toys, passes = (Toy(1, 2), Toy(2, 2)), array([2, 1, 0.77, 0.62, 0.55, 0.5])
    total, lengths = np.zeros((2,) * 4), set()
    for one, two in itertools.product(*(list(t.drafts((), 2)) for t in toys)):
        n = choice(array([one[2], two[2]]), passes, live(2)).tolist()
        lengths.add(tuple(n))
        laws = [
            t.continued(t.outcomes((), d[0][:k]), 2)
            for t, d, k in zip(toys, (one, two), n, strict=True)
        ]
        total += one[1] * two[1] * np.multiply.outer(*laws)
    return np.abs(total - np.multiply.outer(*(t.right(2) for t in toys))).max(), lengths


@pytest.mark.parametrize("name", [n for n in CHOICES if n not in ("search", "ahead")])
def test_stopping_on_what_was_drafted_keeps_the_law(name):
    for found, _ in (distance_of_one(CHOICES[name]), distance_of_two(CHOICES[name])):
        assert found < 1e-12


def test_lengths_of_the_proof_vary_as_recorded():
    """A length that never changes would prove nothing."""
    assert distance_of_one(prefix)[1] == {1, 3}
    assert distance_of_two(prefix)[1] == {(0, 1), (1, 2)}


def test_looking_ahead_breaks_the_law_by_as_much_as_recorded():
    assert distance_of_one(searched)[0] == pytest.approx(0.0371, abs=5e-5)
    assert distance_of_two(searched)[0] == pytest.approx(0.0077, abs=5e-5)
    assert distance_of_one(ahead)[0] > 1e-3


def test_the_papers_counter_example():
    """Appendix A: a search verifies only what leads on to a sure draft."""
    p, q, passes = np.array([0.7, 0.3]), 0.5, array([1, 0.5, 0.45])
    laws = {}
    for name, choice in (("search", searched), ("prefix", prefix)):
        total = np.zeros(2)
        for x, second in enumerate((0.9, 0.0)):
            n = int(choice(array([[0.8, second]]), passes, live(1))[0])
            accept = min(1.0, p[x] / q) if n else 0.0
            left = np.maximum(p - q, 0) / 0.2 if n else p
            total += q * (accept * np.eye(2)[x] + (1 - accept) * left)
        laws[name] = total
    np.testing.assert_allclose(laws["search"], [0.85, 0.15], atol=1e-6)
    np.testing.assert_allclose(laws["prefix"], p, atol=1e-12)


@pytest.mark.parametrize("delay", [2, 0])
def test_a_capacity_of_two_rounds_ago_keeps_the_law_and_one_of_now_does_not(delay):
    """Three rounds of one request, the first four tokens; K = 1 in rounds 1 and 2."""
    toy, passes, total = Toy(8, 2), array([1, 0.6, 0.55]), []

    def go_on(text, weight, past, rounds):
        if not rounds or len(text) >= 4:
            total.append((text, weight))
            return
        for x, chance, confidence in toy.drafts(text, 2):
            now = int(capacity(array([confidence]), passes, live(1)))
            known = [1, 1, *past] if delay else [*past, now]
            K = known[len(past)]
            n = int(top(array([confidence]), jnp.asarray(K), live(1))[0])
            for longer, share in toy.outcomes(text, x[:n]):
                if share > 0:
                    go_on(longer, weight * chance * share, [*past, now], rounds - 1)

    go_on((), 1.0, [], 3)
    found = np.abs(toy.continued(total, 4) - toy.right(4)).max()
    assert (found < 1e-12) if delay else found == pytest.approx(0.0657, abs=5e-5)


# The engine, with real drafts.


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_real_drafts_stopped_by_their_confidence_keep_the_law(rule):
    found = engine.stopped_law("dspark", rule, Sampling())
    assert found.lengths == {1, 2} and found.distance < 1e-5


def test_real_drafts_stopped_by_a_look_ahead_do_not():
    found = engine.stopped_law("dspark", "token", Sampling(), look_ahead=True)
    assert found.lengths == {0, 2} and found.distance > 1e-3


@dataclasses.dataclass(frozen=True)
class Ahead(Threshold):
    """Planted bug: each draft is judged by the confidence behind it."""

    def plan(self, state, confidence, live):
        confidence = jnp.roll(confidence, -1, axis=1).at[:, -1].set(1.0)
        return super().plan(state, confidence, live)


@functools.cache
def models():
    target, params = testing.tiny_target()
    drafter, weights = testing.tiny_drafter("dspark", target, params, gamma=4)
    weights = testing.perturb(weights)
    return target, drafter, Weights(target=params, drafter=weights)


def run(policy, sampling=GREEDY, **options):
    target, drafter, weights = models()
    model = Model(target, drafter, sampling, policy=policy)
    options = {"max_new_tokens": 12} | options
    return generate(model, weights, [[1, 2, 3], [4], [5, 6]], **options)


PASSES = tuple(1 / (4 + n) for n in range(1, 16))
POLICIES = (
    pytest.param(Threshold(0.5), marks=pytest.mark.slow),
    pytest.param(Prefix(PASSES), marks=pytest.mark.slow),
    Delayed(PASSES, 5),
)


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_is_the_targets_own_wherever_drafts_stop(policy):
    """And what a policy left out is not in the trace."""
    whole, ours = run(None), run(policy)
    assert ours.tokens == whole.tokens
    drafted = np.sum(ours.trace.drafted != PAD, axis=2)
    assert np.any(drafted < 4) and np.any(drafted > 0)
    assert np.all(ours.trace.num_accepted <= drafted)
    assert not np.any(ours.trace.rejected & (ours.trace.num_accepted == drafted))


def test_no_draft_at_all_is_plain_decoding():
    found = run(Threshold(1.0))
    assert found.tokens == run(None).tokens
    assert not np.any(found.trace.num_accepted)


def test_policies_that_do_not_fit_are_refused():
    target, drafter, weights = models()
    right = Model(target, drafter, Sampling(), policy=Threshold(0.5))
    bushy = dataclasses.replace(drafter, topology=Tree.full(2))
    for model, message in (
        (dataclasses.replace(right, drafter=bushy), "chains"),
        (dataclasses.replace(right, policy=Prefix((1.0, 0.5))), "for 1 to 2 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, weights, [[1, 2]], max_new_tokens=4)
    draft = Draft(tokens=jnp.zeros((1, 2), jnp.int32), probs=None)
    with pytest.raises(ValueError, match="gives its confidence"):
        scheduler.stop(Threshold(0.5), (), draft, Tree.chain(2), live(1))
    with pytest.raises(ValueError, match="threshold lies"):
        Threshold(1.5)
    with pytest.raises(ValueError, match="positive numbers"):
        Prefix((1.0, 0.0))
    with pytest.raises(ValueError, match="first K"):
        Delayed((1.0,), -1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Threshold, Ahead])
def test_the_sampled_engine_keeps_the_law_and_the_planted_look_ahead_does_not(policy):
    few, counts, _ = engine.proposals("dspark", "chain", Sampling())
    second = np.asarray(few.confidence)[counts > 0, 1]
    policy = policy(float(np.median(second)))
    found = engine.sampled("dspark", Sampling(), policy=policy)
    assert found.accepted > 0.1
    assert (found.p_value > testing.FALSE_ALARM) == (type(policy) is Threshold)
