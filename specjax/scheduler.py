"""Where drafts stop: how many tokens of each row's draft the target is to verify.

DSpark, arXiv:2607.05147, sections 3.2 and 5.2. A drafter says c_k, how likely draft k
of a row is accepted if all before it were (`Draft.confidence`). With SPS(n) the rounds
a second that verify n tokens, R rows that are live, and one anchor a row,

    a_{r,k} = c_{r,1} .. c_{r,k}                                                  (1)
    throughput = (R + sum of admitted a) SPS(R + number admitted)                 (2)

Stopping keeps the target's law only if whether draft k is verified is settled before
draft k is looked at. c_k and a_k do not depend on draft k, but c_{k+1} does. Hence

    below    a row stops before its first c_k under a threshold
    prefix   drafts of all rows are admitted in the order of a until eq. 2 does not
             grow (algorithm 1). As a row's a never rises along it, whoever admits
             (r, k) has not looked at draft k or at anything behind it.
    top      the K largest a of all rows, K chosen without this round's drafts
    capacity the number that maximises eq. 2. It looks at every draft: it may only
             choose the K of a later round. The paper's servers use it two rounds on.

A policy is a frozen record of settings with `init` and `plan`, for `generate.Model`.
Shapes do not change: what is not verified is PAD, as nodes that a tree lacks are. So a
program of one shape wins no time by it; a server that packs what is left does.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Bool, Float, Int
from specjax.verify import PAD, Draft


@runtime_checkable
class Policy(Protocol):
    """Chooses lengths each round; its state is carried from round to round."""

    def init(self) -> Any: ...

    def plan(
        self, state: Any, confidence: Float[Array, "B G"], live: Bool[Array, "B"]
    ) -> tuple[Int[Array, "B"], Any]:
        """Drafts of each row to verify; rows that are not live do not matter."""
        ...


def below(
    confidence: Float[Array, "B G"], threshold: float | Float[Array, ""]
) -> Int[Array, "B"]:
    """Drafts before the first whose own confidence is under the threshold."""
    sure = (confidence >= threshold).astype(jnp.int32)
    return jnp.sum(jnp.cumprod(sure, axis=1), axis=1)


def _ranked(confidence: Float[Array, "B G"], live: Bool[Array, "B"]):
    """a of all candidates in descending order [GB], and each candidate's rank [B G].

    Of equals the shorter prefix comes first, then the lower row: no token decides.
    """
    a = jnp.where(live[:, None], jnp.cumprod(confidence, axis=1), 0.0)
    order = jnp.argsort(-a.T.ravel(), stable=True)
    rank = jnp.argsort(order)
    return a.T.ravel()[order], rank.reshape(a.shape[::-1]).T


def _throughput(a: Float[Array, "X"], passes, live: Bool[Array, "B"]):
    """Eq. 2 after 0, 1, .. X admissions in this order [X + 1]."""
    passes, rows = jnp.asarray(passes, jnp.float32), jnp.sum(live, dtype=jnp.int32)
    needed = live.shape[0] + a.shape[0]
    if passes.shape[0] < needed:
        raise ValueError(
            f"passes a second are known for 1 to {passes.shape[0]} tokens, and a round "
            f"may have {needed}. Measure them up to rows * (gamma + 1)."
        )
    gain = jnp.pad(jnp.cumsum(a), (1, 0)) + rows.astype(jnp.float32)
    at = rows + jnp.arange(a.shape[0] + 1, dtype=jnp.int32) - 1
    return gain * passes[jnp.maximum(at, 0)]


def prefix(
    confidence: Float[Array, "B G"],
    passes: tuple[float, ...] | Float[Array, "X"],
    live: Bool[Array, "B"],
) -> Int[Array, "B"]:
    """Algorithm 1: stops at the first candidate that does not raise eq. 2.

    `passes[n - 1]` are rounds a second that verify n tokens, anchors included.
    """
    a, rank = _ranked(confidence, live)
    theta = _throughput(a, passes, live)
    rises = (theta[1:] > theta[:-1]) & (a > 0)
    admitted = jnp.sum(jnp.cumprod(rises.astype(jnp.int32)))
    return jnp.sum(rank < admitted, axis=1, dtype=jnp.int32)


def capacity(
    confidence: Float[Array, "B G"],
    passes: tuple[float, ...] | Float[Array, "X"],
    live: Bool[Array, "B"],
) -> Int[Array, ""]:
    """Drafts of all rows together that maximise eq. 2. Only for a later round."""
    a, _ = _ranked(confidence, live)
    theta = _throughput(a, passes, live)
    worth = jnp.pad(a > 0, (1, 0), constant_values=True)
    return jnp.argmax(jnp.where(worth, theta, -jnp.inf)).astype(jnp.int32)


def top(
    confidence: Float[Array, "B G"], count: Int[Array, ""], live: Bool[Array, "B"]
) -> Int[Array, "B"]:
    """Lengths that admit the `count` drafts of largest a."""
    a, rank = _ranked(confidence, live)
    count = jnp.minimum(count, jnp.sum(a > 0))
    return jnp.sum(rank < count, axis=1, dtype=jnp.int32)


def cut(draft: Draft, lengths: Int[Array, "B"]) -> Draft:
    """A chain whose tokens from each row's length on are not drafted."""
    slot = jnp.arange(draft.tokens.shape[1])
    tokens = jnp.where(slot[None] < lengths[:, None], draft.tokens, PAD)
    return dataclasses.replace(draft, tokens=tokens)


def stop(
    policy: Policy,
    state: Any,
    draft: Draft,
    tree: Tree | DynamicTree,
    live: Bool[Array, "B"],
) -> tuple[Draft, Any]:
    """The draft as a policy leaves it, and the policy's new state."""
    if isinstance(tree, DynamicTree) or not tree.is_chain:
        raise ValueError(
            f"{type(policy).__name__} stops chains, and the draft is a tree of "
            f"{tree.num_nodes} nodes; leave out the policy or the topology."
        )
    if draft.confidence is None:
        raise ValueError(
            f"{type(policy).__name__} needs a drafter that gives its confidence, such "
            "as dspark."
        )
    lengths, state = policy.plan(state, draft.confidence, live)
    return cut(draft, lengths), state


def _check_passes(passes: tuple[float, ...]) -> None:
    if not passes or min(passes) <= 0:
        raise ValueError(
            "passes a second over 1, 2, .. tokens must be positive numbers, got "
            f"{passes}."
        )


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Each row by itself (`below`)."""

    value: float

    def __post_init__(self):
        if not 0 <= self.value <= 1:
            raise ValueError(f"a threshold lies in [0, 1], got {self.value}.")

    def init(self) -> tuple[()]:
        return ()

    def plan(self, state, confidence, live):
        del live
        return below(confidence, self.value), state


@dataclasses.dataclass(frozen=True)
class Prefix:
    """All rows together, by this round's confidence (`prefix`)."""

    passes: tuple[float, ...]  # a second, over 1, 2, .. tokens

    def __post_init__(self):
        _check_passes(self.passes)

    def init(self) -> tuple[()]:
        return ()

    def plan(self, state, confidence, live):
        return prefix(confidence, self.passes, live), state


@dataclasses.dataclass(frozen=True)
class Delayed:
    """The asynchronous form: `top` K, where K is the `capacity` of two rounds ago.

    The size of a pass is then known before its drafts are, so that a server can prepare
    it. The paper leaves open what K counts; here it is drafts, anchors always run.
    """

    passes: tuple[float, ...]  # a second, over 1, 2, .. tokens
    first: int  # K of the first two rounds

    def __post_init__(self):
        _check_passes(self.passes)
        if self.first < 0:
            raise ValueError(f"the first K must be >= 0, got {self.first}.")

    def init(self) -> Int[Array, "X"]:
        """K of the coming round and of the one after it."""
        return jnp.full((2,), self.first, jnp.int32)

    def plan(self, state, confidence, live):
        following = capacity(confidence, self.passes, live)
        return top(confidence, state[0], live), jnp.stack([state[1], following])
