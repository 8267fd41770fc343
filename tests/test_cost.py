"""The governing equation by hand, and curves that a scheduler takes."""

import io
import json
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from specjax import bench, cost, scheduler
from specjax.commands.cost import ALPHAS, Cost, _beside, _measured_tables, _plan_tables


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "speed"),
    [
        (0.6, 0.05, 4, 1.921),
        (0.7, 0.05, 6, 2.353),
        (0.8, 0.05, 8, 3.092),
        (0.9, 0.05, 13, 4.674),
        (0.6, 0.10, 3, 1.674),
        (0.7, 0.10, 4, 1.981),
        (0.8, 0.10, 6, 2.470),
        (0.9, 0.10, 10, 3.431),
        (0.6, 0.20, 2, 1.400),
        (0.7, 0.20, 3, 1.583),
        (0.8, 0.20, 4, 1.868),
        (0.9, 0.20, 7, 2.373),
    ],
)
def test_the_best_gamma_of_a_sequential_drafter_is_the_known_one(
    alpha, c, gamma, speed
):
    """S = tau / (1 + c gamma): the optima of the closed form, to three places."""
    gammas = np.arange(1, 25)
    speeds = cost.speedups(cost.survival(alpha, 24), np.ones(24), c * gammas)
    best, found = cost.best_gamma(speeds)
    assert best == gamma
    assert found == pytest.approx(speed, abs=5e-4)


def test_tau_of_all_shorter_chains_comes_from_the_longest():
    np.testing.assert_allclose(cost.taus([0.5, 0.4, 0.1]), [1.5, 1.9, 2.0])
    np.testing.assert_allclose(cost.survival([0.8, 0.5], 4), [0.8, 0.4, 0.2, 0.1])
    np.testing.assert_allclose(cost.survival([0.8, 0.5], 1), [0.8])


def test_break_even_is_where_one_draft_pays_for_itself():
    """With one draft S = (1 + alpha) / (v + c): alpha = v + c - 1."""
    assert cost.break_even([1.1], [0.2]) == pytest.approx(0.3)
    assert cost.break_even([1.0], [0.0]) == 0.0
    # A free verify pass and gamma c: the first draft decides, alpha = c.
    assert cost.break_even(np.ones(8), 0.25 * np.arange(1, 9)) == pytest.approx(0.25)


def test_break_even_is_none_where_nothing_gains():
    assert cost.break_even([3.0, 4.0], [0.5, 0.5]) is None


def test_a_curve_is_linear_between_and_goes_on():
    curve = cost.Curve(rows=2, tokens=(2, 4, 8), seconds=(0.1, 0.2, 0.25))
    assert curve.at(3) == pytest.approx(0.15)
    assert curve.at(16) == pytest.approx(0.35)
    np.testing.assert_allclose(curve.ratio([1, 2, 4]), [1, 2, 2.5])
    np.testing.assert_allclose(curve.passes(4), [10, 10, 1 / 0.15, 5])


def test_written_passes_are_what_the_scheduler_takes(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"curves": [{"rows": 2, "passes": [1.0, 0.8, 0.5]}]}))
    assert scheduler.Prefix(cost.load_passes(path, 2)).passes == (1.0, 0.8, 0.5)
    with pytest.raises(ValueError, match="curves of 2 rows, not of 3"):
        cost.load_passes(path, 3)
    written = {"rows": 2, "passes": [4.0, 2.0, 1.0]}  # a plain round takes 1/4 s
    drafters = [{"drafter": "dspark", "c": [0.5, 1.0]}]  # and its whole draft as much
    path.write_text(json.dumps({"curves": [written], "drafters": drafters}))
    found = cost.load_passes(path, 2, drafter="dspark")
    np.testing.assert_allclose(found, [2.0, 4 / 3, 0.8])
    with pytest.raises(ValueError, match="of 2 rows by dspark, not of 2 by medusa"):
        cost.load_passes(path, 2, drafter="medusa")
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no curves"):
        cost.load_passes(path)


def test_c_is_timed_at_rounds_of_known_width_and_the_largest():
    assert cost.gammas_to_time(5) == (1, 3, 5)
    assert cost.gammas_to_time(7) == (1, 3, 7)
    assert cost.gammas_to_time(1) == (1,)
    assert cost.gammas_to_time(5, (2, 9)) == (2, 5)
    times = cost.Times(cost.Curve(1, (1,), (1.0,)), {("a", 1): 0.2, ("a", 3): 0.6})
    np.testing.assert_allclose(times.draft_cost("a", range(1, 5)), [0.2, 0.4, 0.6, 0.6])


class Drafter:
    gamma = 3


# Ratios that a repeat has to those of `spent`: their median is 1 and no raw median's.
UNEVEN = {1: (1.0,), 3: (1.0, 0.5, 4.0)}


@pytest.mark.parametrize("drift", [1.0, 3.0])
def test_a_repeat_is_compared_with_itself(drift):
    """A machine that turns slower after a repeat changes no ratio."""
    spent = {1: 1.0, 2: 1.5, 4: 2.0, "drafter": 2.6}
    calls = []

    class Runner(bench.Bench):
        def __init__(self):
            self.settings = bench.Settings(timing_repeats=int(drift), batch_size=3)
            self.tasks = {"all": [[1]]}
            self.pretrained = mock.Mock()

        def batches(self, task):
            return [self.tasks[task]]

        def model(self, drafter, temperature):
            return drafter

        def seconds_per_round(self, model, weights, prompts):
            assert len(prompts) == 3
            kind = "drafter" if isinstance(model, Drafter) else model.tree.num_nodes  # pyright: ignore
            calls.append(kind)
            if len(calls) <= 4:  # what is compiled in the first repeat
                return 100.0 * len(calls) ** 3
            repeat = (len(calls) - 1) // 4
            uneven = 1 if kind == 1 else UNEVEN[int(drift)][repeat - 1]
            return spent[kind] * uneven * drift**repeat

    drafters = {"a": (Drafter(), None)}
    times = cost.measure(Runner(), drafters, 0.0, nodes=(1, 2), gammas=(3,))
    assert calls[:4] == [1, 2, 4, "drafter"]  # beside the free round of its width
    np.testing.assert_allclose(times.curve.ratio([1, 2, 4]), [1, 1.5, 2])
    assert times.added == {("a", 3): pytest.approx(0.6)}


def test_flags_in_microseconds_and_shares_reach_the_plan_as_they_are(monkeypatch):
    class Seen(Exception):
        pass

    def plan(config, setup):
        raise Seen(setup)

    monkeypatch.setattr("specjax.roofline.Plan", plan)
    command = Cost(
        chip="h100", collective_us=30.0, pass_us=7.0, bandwidth_share=0.6, batch=(3,)
    )
    with pytest.raises(Seen) as seen:
        command.run()
    setup = seen.value.args[0]
    assert (setup.collective, setup.overhead) == pytest.approx((30e-6, 7e-6))
    assert (setup.bandwidth_share, setup.compute_share, setup.batch) == (0.6, 0.5, 3)


def test_a_measured_drafter_is_judged_by_rounds_of_one_node_more():
    curve = cost.Curve(1, (1, 2, 3, 4), (1.0, 1.1, 1.3, 1.7))
    times = cost.Times(curve, {("a", 3): 0.1})
    drafter = mock.Mock(gamma=3)
    row = Cost(alpha=(0.5,))._judge(mock.MagicMock(), times, "a", drafter, None)
    np.testing.assert_allclose(row["v"], [1.1, 1.3, 1.7])
    np.testing.assert_allclose(row["c"], [0.1] * 3)
    assert row["speedup"][0] == pytest.approx(1.5 / 1.2)


def test_a_measured_speedup_is_that_over_plain_decoding(monkeypatch):
    monkeypatch.setattr("specjax.metrics.tau", lambda trace: 2.5)
    run, plain = (mock.Mock(tokens_per_second=n) for n in (30.0, 20.0))
    row = _beside(2, run, plain, [1.0, 1.8])
    assert row["measured"] == 1.5
    assert row["error"] == pytest.approx(0.2)


@pytest.mark.parametrize("width", [80, 150])
def test_the_tables_of_cost_fit_a_terminal(width):
    row = {"drafter": "gemma4_mtp", "params": 2.19e9, "c": [0.123], "v": [11.01]}
    row |= {"tau": [12.57], "speedup": [13.57], "best_gamma": 1, "gammas": [1]}
    row |= {"best_speedup": 13.57, "break_even": 0.35}
    row["by_alpha"] = [{"speedup": 10.1 + i} for i in range(len(ALPHAS))]
    row["measured"] = [{"gamma": 1, "measured": 12.34, "error": -0.12}]
    row["trees"] = [{"nodes": 16, "speedup": 2.34}]
    screen = Console(width=width, file=io.StringIO())
    for tables in (
        _plan_tables([row], (0.8, 0.7), screen),
        _measured_tables([row], "acceptance measured at T = 0, 1 row", screen),
    ):
        assert len(tables) == 1 + (width == 80)
        screen.print(*tables)
    out = screen.file.getvalue()
    assert max(map(len, out.splitlines())) <= width
    cells = ("gemma4_mtp", "2.19B", "13.57x", "0.35", "10.10", "14.10", "0.8 0.7")
    cells += ("break-even", "12.34x", "-12%", "16: 2.34x", "1*")
    assert all(cell in out for cell in cells)
