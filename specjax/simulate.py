"""A server that is computed: what serving would take at sizes that do not fit here.

`serving.serve` drives a `Simulator` as it drives real models. A round of R requests
takes

    draft[R] + verify[n],   n = the tokens verified, R anchors included           (1)

seconds of a machine that packs the drafts of all rows into one pass; with `widths` n is
slots times the narrowest width that holds the longest draft, as `serving.Batch` pays.
The curves are measured (`Costs.of`) or given (`roofline`, `stairs`). What drafts say of
themselves and how many are accepted comes from one of

    Recorded   rounds of a real drafter whose drafts were verified whole; one that is
               stopped at l accepts min(accepted, l): no draft knows what follows it
    Modelled   draft k is accepted with a probability of its own, drawn from a beta
               distribution whose mean is the given alpha_k. A confidence is this
               probability, times a factor: 1 is calibrated                       (2)

In `Modelled` alpha_k is acceptance given that all before were accepted, as papers print
it, whatever the spread: probabilities of a round are drawn independently.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.serving import Batch, Report, Request, Round


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the parts of serving."""

    verify: tuple[float, ...]  # a pass over 1, 2, .. tokens, and the commit
    draft: tuple[float, ...]  # drafts of 1, 2, .. rows
    begin: float  # a prompt, alone

    @classmethod
    def of(cls, batch: Batch, repeats: int = 20) -> "Costs":
        """Measured on the slots of real models, straight between their widths."""
        found = batch.seconds(repeats)
        tokens = [batch.slots * w for w in batch.widths]
        at = np.arange(1, tokens[-1] + 1)
        verify = np.interp(at, tokens, [found["verify"][w] for w in batch.widths])
        draft = (found["draft"],) * batch.slots
        return cls(tuple(verify.tolist()), draft, found["begin"])

    def passes(self, rows: int) -> tuple[float, ...]:
        """Rounds a second over 1, 2, .. tokens: what a scheduler is told."""
        return tuple(1 / (self.draft[rows - 1] + v) for v in self.verify)


def roofline(
    most: int, *, read: float, token: float, fixed: float = 0.0
) -> tuple[float, ...]:
    """Seconds of passes over 1 .. `most` tokens: weights are read or sums are done.

    `read` seconds to read the weights once, `token` seconds of arithmetic a token,
    `fixed` beside both.
    """
    return tuple(fixed + max(read, token * n) for n in range(1, most + 1))


def stairs(seconds: Sequence[float], step: int) -> tuple[float, ...]:
    """A curve whose tokens are padded to a multiple of `step`, as kernels do."""
    last = len(seconds) - 1
    up = [min(math.ceil(n / step) * step - 1, last) for n in range(1, last + 2)]
    return tuple(seconds[i] for i in up)


@runtime_checkable
class Drafts(Protocol):
    """Where rounds come from."""

    @property
    def gamma(self) -> int: ...

    def draw(
        self, rng: np.random.Generator, sources: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Confidence [B G] and drafts accepted if all are verified [B]."""
        ...


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Rounds of a real drafter; a request draws those of its own seed."""

    confidence: np.ndarray  # [X G]
    accepted: np.ndarray  # [X]
    source: np.ndarray  # seed of the request each is of [X]

    @classmethod
    def of(cls, report: Report) -> "Recorded":
        """The rounds of a run that verified every draft whole, but for each last one.

        The end of a text cuts a round, and what it would have accepted is not known.
        """
        rounds = [
            (sure, n, one.request.seed)
            for one in report.served
            for sure, n in zip(one.confidence[:-1], one.accepted[:-1], strict=True)
        ]
        if not rounds:
            raise ValueError(
                "no request of this run has two rounds whose drafts say how sure they "
                "are: ask for more tokens, of a drafter such as dspark."
            )
        return cls(*(np.array(column) for column in zip(*rounds, strict=True)))

    @property
    def gamma(self) -> int:
        return self.confidence.shape[1]

    def draw(self, rng, sources):
        own = [np.flatnonzero(self.source == s) for s in sources]
        every = np.arange(len(self.source))
        at = [rng.choice(mine if len(mine) else every) for mine in own]
        return self.confidence[at], self.accepted[at]


@dataclasses.dataclass(frozen=True)
class Modelled:
    """Drafts by eq. 2."""

    alphas: tuple[float, ...]  # acceptance by position, given all before
    # a + b of the beta distribution: the smaller, the more drafts differ. None: all
    # are accepted with alpha_k, and say so.
    spread: float | None = None
    factor: float = 1.0  # what a confidence is wrong by

    def __post_init__(self):
        if not all(0 <= a <= 1 for a in self.alphas):
            raise ValueError(f"acceptances lie in [0, 1], got {self.alphas}.")
        sure = any(a in (0, 1) for a in self.alphas)
        if self.spread is not None and (self.spread <= 0 or sure):
            raise ValueError(
                f"a spread needs to be > 0 and acceptances inside (0, 1), got "
                f"{self.spread} and {self.alphas}; leave the spread out where all "
                "drafts are alike."
            )

    @property
    def gamma(self) -> int:
        return len(self.alphas)

    def draw(self, rng, sources):
        shape = len(sources), self.gamma
        chance = np.broadcast_to(self.alphas, shape)
        if self.spread is not None:
            chance = rng.beta(self.spread * chance, self.spread * (1 - chance))
        stays = rng.random(shape) < chance
        accepted = np.cumprod(stays, axis=1).sum(axis=1)
        return np.minimum(self.factor * chance, 1.0), accepted


@functools.partial(jax.jit, static_argnames=("policy",))
def _plan(policy: Any, state: Any, confidence, live):
    return policy.plan(state, confidence, live)


class Simulator:
    """Slots of no models; see `serving.Engine`. A request has just the tokens it asks
    for: its `max_new_tokens` stand for the length of its text."""

    def __init__(
        self,
        drafts: Drafts,
        costs: Costs,
        slots: int,
        *,
        policy: Any = None,
        gamma: int | None = None,
        widths: Sequence[int] | None = None,
        seed: int = 0,
    ):
        """A policy says how much of a draft is verified; without one `gamma` does.

        `widths` are nodes a slot that there are passes for; None packs what is
        verified.
        """
        self.gamma = drafts.gamma if gamma is None else gamma
        if not 0 <= self.gamma <= drafts.gamma:
            raise ValueError(
                f"these drafts have {drafts.gamma} tokens, so gamma lies in 0 to "
                f"{drafts.gamma}; got {gamma}."
            )
        needed = slots * (self.gamma + 1)
        if len(costs.verify) < needed or len(costs.draft) < slots:
            raise ValueError(
                f"{slots} slots need the seconds of passes over up to {needed} tokens "
                f"and of drafts of {slots} rows; the costs end at "
                f"{len(costs.verify)} and {len(costs.draft)}."
            )
        self.drafts, self.costs, self.slots, self.policy = drafts, costs, slots, policy
        self.widths = None if widths is None else sorted(widths)
        self.plan = () if policy is None else policy.init()
        self.rng = np.random.default_rng(seed)
        self.left = np.zeros(slots, int)  # tokens still to come
        self.seeds = np.zeros(slots, int)

    def begin(self, slot: int, request: Request) -> tuple[float, bool]:
        self.left[slot], self.seeds[slot] = request.max_new_tokens - 1, request.seed
        return self.costs.begin, request.max_new_tokens == 1

    def round(self) -> Round:
        live = self.left > 0
        confidence, accepted = self.drafts.draw(self.rng, self.seeds)
        confidence = confidence[:, : self.gamma]
        verified = np.where(live, 1 + self._lengths(confidence, live), 0)
        accepted = np.minimum(accepted, np.maximum(verified - 1, 0))
        committed = np.where(live, np.minimum(accepted + 1, self.left), 0)
        self.left = self.left - committed
        rows, paid = int(live.sum()), int(verified.sum())
        if self.widths is not None:
            width = next(w for w in self.widths if w >= verified.max())
            rows, paid = self.slots, self.slots * width
        seconds = self.costs.verify[paid - 1]
        if self.gamma:
            seconds += self.costs.draft[rows - 1]
        return Round(
            seconds=seconds,
            live=live,
            verified=verified,
            paid=paid,
            accepted=np.minimum(accepted, committed),
            committed=committed,
            ended=live & (self.left == 0),
            confidence=confidence,
        )

    def _lengths(self, confidence: np.ndarray, live: np.ndarray) -> np.ndarray:
        if self.policy is None or not self.gamma:
            return np.full(self.slots, self.gamma)
        sure = jnp.asarray(confidence, jnp.float32)
        found = _plan(self.policy, self.plan, sure, jnp.asarray(live))
        lengths, self.plan = found
        return np.asarray(lengths)

    def text(self, slot: int) -> list[int]:
        del slot
        return []
