"""The computed server: closed forms, conservation, and what its drafts promise."""

import dataclasses

import numpy as np
import pytest
from test_serving import REQUESTS, batch

from specjax.calibration import auc
from specjax.scheduler import Delayed, Prefix, Threshold
from specjax.serving import Batch, Request, poisson, serve, summary
from specjax.simulate import Costs, Modelled, Recorded, Simulator, roofline, stairs

ALPHAS = (0.8, 0.7, 0.6, 0.5)
COSTS = Costs(roofline(60, read=4.0, token=0.25, fixed=1.0), (0.5,) * 12, begin=3.0)
MANY = [Request((1,), n, seed=n) for n in (7, 1, 30, 2, 18, 9, 9, 25, 4, 11)]


def run(requests=MANY, slots=4, drafts=None, users=None, **options):
    drafts = drafts or Modelled(ALPHAS, spread=4.0)
    return serve(Simulator(drafts, COSTS, slots, **options), requests, users)


def test_one_user_without_drafts_takes_what_the_curve_says():
    report = run(slots=1, gamma=0, users=1)
    for one, request in zip(report.served, MANY, strict=True):
        assert one.first - one.begun == 3.0
        assert one.end - one.first == pytest.approx(5.0 * (request.max_new_tokens - 1))
    assert summary(report)["user_speed"] == pytest.approx(1 / 5)


def test_drafts_that_are_all_accepted_take_whole_rounds():
    """One prompt, its token, then 12 tokens in rounds of 5, 5 and 2."""
    sure = Modelled((1.0,) * 4)
    report = run([Request((1,), 13)], slots=1, drafts=sure)
    assert [r.committed.tolist() for r in report.rounds] == [[5], [5], [2]]
    assert [r.accepted.tolist() for r in report.rounds] == [[4], [4], [2]]
    assert report.served[0].end == pytest.approx(3.0 + 3 * (0.5 + 5.0))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_throughput_without_a_queue_is_that_of_the_whole_time(count):
    """Prompts are read one after the other, yet no request waits for a slot."""
    report = run(MANY[2:][:count])
    tokens = sum(s.num_tokens for s in report.served)
    assert summary(report)["throughput"] == pytest.approx(tokens / report.ends[-1])


def test_throughput_with_a_queue_ends_when_the_last_request_leaves_it():
    report = run()
    until = max(s.begun for s in report.served)
    assert 0 < until < report.ends[-1]
    rounds = zip(report.rounds, report.ends, strict=True)
    tokens = sum(int(r.committed.sum()) for r, end in rounds if end <= until)
    tokens += len(MANY) - 1  # the last one's first token comes later
    assert summary(report)["throughput"] == pytest.approx(tokens / until)


POLICIES = (None, Threshold(0.6), Prefix(COSTS.passes(4)), Delayed(COSTS.passes(4), 3))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("users", [None, 3])
def test_tokens_out_are_those_asked_for_and_time_only_grows(policy, users):
    report = run(policy=policy, users=users)
    assert sorted(s.num_tokens for s in report.served) == sorted(
        r.max_new_tokens for r in MANY
    )
    committed = sum(int(r.committed.sum()) for r in report.rounds)
    assert committed + len(MANY) == sum(r.max_new_tokens for r in MANY)
    assert np.all(np.diff(report.ends) > 0)
    for one in report.served:
        assert one.arrival <= one.begun < one.first <= one.end
        assert sum(n + 1 for n in one.accepted) >= one.num_tokens - 1
    busy = sum(r.seconds for r in report.rounds) + 3.0 * len(MANY)
    assert report.ends[-1] == pytest.approx(busy)


def test_a_packed_pass_pays_for_the_sum_and_a_padded_one_for_the_longest():
    """Two live of four slots; the widest draft of the round decides."""
    two = [Request((1,), 40, seed=i) for i in range(2)]
    packed, padded = (
        run(two, policy=Threshold(0.6), widths=w).rounds for w in (None, (1, 3, 5))
    )
    assert all(r.paid == r.verified.sum() for r in packed)
    assert all(r.paid in (4, 12, 20) for r in padded)
    assert all(r.paid >= 4 * r.verified.max() for r in padded)
    first = packed[0]
    assert first.seconds == pytest.approx(0.5 + COSTS.verify[first.paid - 1])


def test_modelled_drafts_have_the_acceptance_and_the_confidence_they_are_given():
    drafts, rng = Modelled(ALPHAS, spread=2.0), np.random.default_rng(0)
    sure, accepted = drafts.draw(rng, np.zeros(40_000, int))
    for k, alpha in enumerate(ALPHAS):
        tried = accepted >= k
        kept = accepted >= k + 1
        assert kept.sum() / tried.sum() == pytest.approx(alpha, abs=0.02)
        some = tried & (np.abs(sure[:, k] - 0.5) < 0.05)
        assert kept[some].mean() == pytest.approx(sure[some, k].mean(), abs=0.07)
    assert auc(sure[:, 0], accepted > 0) > 0.75
    high = dataclasses.replace(drafts, factor=1.1)
    higher, _ = high.draw(np.random.default_rng(0), np.zeros(40_000, int))
    np.testing.assert_array_equal(higher, np.minimum(1.1 * sure, 1.0))


@pytest.mark.slow
def test_recorded_rounds_are_those_of_the_same_request():
    report = serve(batch(), REQUESTS)
    drafts = Recorded.of(report)
    assert drafts.gamma == 4 and len(drafts.accepted) > 5
    whole = [n for one in report.served for n in one.accepted[:-1]]
    assert drafts.accepted.tolist() == whole
    seed = int(drafts.source[0])
    sure, _ = drafts.draw(np.random.default_rng(0), np.full(9, seed))
    assert {tuple(row) for row in sure} <= {
        tuple(row) for row in drafts.confidence[drafts.source == seed]
    }
    with pytest.raises(ValueError, match="has two rounds whose drafts say"):
        Recorded.of(run([Request((1,), 1)]))


def test_costs_are_those_of_the_programs_that_were_timed():
    """The clock counts its own readings: everything takes one."""
    costs = Costs.of(batch(widths=(2, 5)), repeats=1)
    assert costs.begin == 1.0 and costs.draft == (1.0, 1.0)
    assert costs.verify == (1.0,) * 10
    assert costs.passes(2) == (0.5,) * 10


def test_curves():
    assert roofline(4, read=2.0, token=0.75, fixed=1.0) == (3.0, 3.0, 3.25, 4.0)
    assert stairs((1.0, 2.0, 3.0, 4.0, 5.0), 2) == (2.0, 2.0, 4.0, 4.0, 5.0)
    times = poisson(rate=4.0, count=4000)
    assert np.all(np.diff(times) > 0) and times[-1] == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"alphas": (0.5, 1.2)}, "acceptances lie in"),
        ({"alphas": (0.5, 1.0), "spread": 2.0}, "leave the spread out"),
        ({"alphas": (0.5,), "spread": 0.0}, "spread needs to be > 0"),
    ],
)
def test_drafts_that_cannot_be_drawn_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Modelled(**fields)


def test_costs_that_end_too_early_are_refused():
    with pytest.raises(ValueError, match="up to 65 tokens and of drafts of 13 rows"):
        run(slots=13)
    with pytest.raises(ValueError, match="gamma lies in 0 to 4; got 5"):
        run(gamma=5)


def test_drafts_cost_what_their_rows_do_and_passes_what_their_tokens_do():
    costs = Costs((1.0,) * 10, (0.5, 3.0), begin=0.0)
    assert [costs.passes(rows)[0] for rows in (1, 2)] == [1 / 1.5, 1 / 4]
    sure = Modelled((1.0,) * 4)
    asked = [Request((1,), 6), Request((1,), 11)]
    report = serve(Simulator(sure, costs, 2), asked)
    assert [r.seconds for r in report.rounds] == [4.0, 1.5]

    class Timed(Batch):
        def __init__(self):
            self.slots, self.widths = 2, (2, 4)

        def seconds(self, repeats=1):
            return {"begin": 1.0, "draft": 2.0, "verify": {2: 1.0, 4: 3.0}}

    assert Costs.of(Timed()) == Costs(
        (1.0, 1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0), (2.0, 2.0), 1.0
    )
