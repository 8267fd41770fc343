"""Wrong rules that look right: each must have the law computed for it.

That each is caught on two fixtures, and each broken engine too, is checked by `specjax
certify`, which CI runs. A sampled check has a false-alarm rate of 1e-6.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import scheduler, testing, verify
from specjax.certify import broken, engine, exact, f4, planted
from specjax.drafters.medusa import Medusa
from specjax.sampling import GREEDY, Sampling

APPROXIMATE = {38: 4e-3}  # "descend to the likeliest child" leaves details open


@pytest.mark.parametrize("number", planted.BUGS)
def test_a_wrong_rule_has_the_law_computed_for_it(number):
    bug, law = planted.BUGS[number], np.array(f4.BUGS[number])
    if bug.sample is None:
        ours = planted.law_of(bug, f4.P, f4.Q).ravel()
        assert exact.tv(ours, law) < APPROXIMATE.get(number, 5e-5)
    else:
        counts = planted.counts_of(bug, f4.P, f4.Q)
        assert testing.chi_square(counts, law) > testing.FALSE_ALARM


STOPS = {
    "threshold": lambda c, live: scheduler.below(c, 0.7),
    "prefix": lambda c, live: scheduler.prefix(c, (1.0, 0.6, 0.45), live),
    "top": lambda c, live: scheduler.top(c, jnp.asarray(1), live),
}
CONTROLS = {
    f"{rule} stopped by {name}": planted.Bug(
        "", planted.TWO, planted.stopped(rule, lengths)
    )
    for rule in ("token", "block")
    for name, lengths in STOPS.items()
} | {
    "one token": planted.Bug("", planted.ONE, verify.RULES["token"]),
    "two tokens": planted.Bug("", planted.TWO, verify.RULES["token"]),
    "block": planted.Bug("", planted.TWO, verify.RULES["block"]),
    "siblings": planted.Bug("", planted.WIDE, verify.RULES["recursive"]),
    "traversal": planted.Bug("", planted.BUSHY, verify.RULES["traversal"]),
    "argmax draft": planted.Bug(
        "", planted.TWO, verify.RULES["match"], drawn=planted.one_hot
    ),
    "draft law unknown": planted.Bug(
        "", planted.TWO, verify.RULES["match"], drawn=planted.softer
    ),
    "likeliest siblings": planted.Bug(
        "", planted.WIDE, verify.RULES["match"], top=True
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_right_rule_passes(control):
    assert max(planted.margins(CONTROLS[control])) < 0.1


def test_the_first_token_alone_would_miss_a_bonus_from_the_wrong_row():
    """Why the joint is tested: this rule's first token has exactly the right law."""
    law = planted.law_of(planted.BUGS[4], f4.P, f4.Q)
    np.testing.assert_allclose(law.sum(1), f4.P[4], atol=1e-6)


def test_a_hit_on_an_impossible_text_fails_outright():
    assert testing.chi_square(np.array([9_999, 1]), np.array([1.0, 0.0])) == 0


def test_a_shipped_rule_with_one_line_broken_is_caught_through_every_drafter():
    broken = planted.patched("token", residual=lambda q, p: p)
    for name in ("draft_model", "medusa"):
        distance, _ = engine.exact_law(name, broken, "chain", Sampling(), Sampling())
        assert distance > exact.TOLERANCE


@pytest.mark.slow
def test_the_certificate_catches_a_broken_engine():
    """One of them; `specjax certify` runs all."""
    (bug,) = (b for b in broken.ENGINES if b.name == "path not gathered")
    assert broken.margin(bug) > 1


def test_the_certificate_is_for_sampling_only():
    with pytest.raises(ValueError, match="needs a sampled law"):
        engine.sampled("medusa", GREEDY)


class LateArgmax(Medusa):
    """Planted bug: tokens 3 and 4 are the likeliest ones, said to be drawn."""

    def draft(self, params, shared, state, anchor, sampling, keys):
        draft, state = super().draft(params, shared, state, anchor, sampling, keys)
        best = jnp.argmax(draft.probs[:, 2:], axis=-1).astype(jnp.int32)
        tokens = draft.tokens.at[:, 2:].set(best)
        return dataclasses.replace(draft, tokens=tokens), state


def test_a_drafter_that_does_not_draw_what_it_says_is_caught_deep_in_its_draft():
    target, params = engine.target_kit()
    for cls, caught in ((Medusa, False), (LateArgmax, True)):
        drafter = cls()
        weights = drafter.init(jax.random.key(0), target.shared(params))
        p_value = engine.drawn_p_value(
            drafter, weights, target, params, engine.PROMPT, Sampling()
        )
        assert (p_value < testing.FALSE_ALARM) == caught
