"""Many requests served together by one target: continuous batching, and its measures.

A server has B slots and a queue. While requests are left,

    every free slot takes the request that has waited longest       `Engine.begin`
    one round of all slots: draft, verify, commit                   `Engine.round`

and a row that ends leaves its slot at once. `serve` is this loop. Time is a clock that
only work moves, and an idle server jumps to the next arrival: so the loop runs real
models, whose work is timed (`Batch`), and computed ones (`simulate.Simulator`) alike.

`Batch` is the engine of `generate` on rows of one compiled shape. A prompt is read by
itself and its row is then put whole into the slot, so that nothing of the slot's last
request is left and no neighbour notices. A draft that its policy stopped saves time
only if the pass gets narrower: there is a program for each of a few widths, and a round
takes the narrowest that holds its longest draft. All slots then pay for the longest.
A server that packs the drafts of all rows into one pass pays for their sum: `verified`
counts it beside what was paid.

A row draws from the same keys as in `generate` whatever the width, so under a policy
that looks at each row alone its text is what `generate` gives it, sampled or not.
"""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import generate
from specjax.generate import LENGTH, RUNNING, Model, Progress, Weights
from specjax.tree import Tree
from specjax.typing import Array, PRNGKey
from specjax.verify import PAD, Draft


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks for."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int = 0
    arrival: float = 0.0  # seconds


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round did; an array has an entry a slot [B]."""

    seconds: float
    live: np.ndarray  # slots that held a request
    verified: np.ndarray  # tokens verified, the anchor included; 0 of a free slot
    paid: int  # tokens in the pass, padding and free slots included
    accepted: np.ndarray  # drafted tokens that stayed
    committed: np.ndarray  # tokens that reached the texts
    ended: np.ndarray  # requests that are done
    confidence: np.ndarray | None = None  # [B G], if the drafter gives it


@runtime_checkable
class Engine(Protocol):
    """What `serve` drives."""

    slots: int

    def begin(self, slot: int, request: Request) -> tuple[float, bool]:
        """Reads a prompt and gives its first token: seconds, and whether it ended."""
        ...

    def round(self) -> Round: ...

    def text(self, slot: int) -> list[int]:
        """Tokens of a slot so far."""
        ...


@dataclasses.dataclass
class Served:
    """A request and what became of it; times in seconds from the start."""

    request: Request
    arrival: float
    begun: float  # left the queue
    first: float = math.nan  # its first token
    end: float = math.nan
    num_tokens: int = 1
    # By round.
    accepted: list[int] = dataclasses.field(default_factory=list)
    confidence: list[np.ndarray] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Report:
    served: list[Served]  # in the order they ended
    rounds: list[Round]
    ends: list[float]  # when each round ended


def poisson(rate: float, count: int, seed: int = 0) -> np.ndarray:
    """Times of `count` arrivals, `rate` a second."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def serve(
    engine: Engine, requests: Sequence[Request], users: int | None = None
) -> Report:
    """Serves all requests, each from its arrival on.

    With `users` arrivals do not count: so many users send one at the start, and
    whenever a request ends the next of the list is sent.
    """
    queue = list(requests)
    if users is not None and users < 1:
        raise ValueError(f"somebody must send the requests: users >= 1, got {users}.")
    if users is None:
        queue.sort(key=lambda r: r.arrival)
        open_at = [r.arrival for r in queue]
    else:
        open_at = [0.0 if i < users else math.inf for i in range(len(queue))]
    busy: dict[int, Served] = {}
    done: list[Served] = []
    rounds, ends, now, taken = [], [], 0.0, 0

    def leave(slot: int) -> None:
        one = busy.pop(slot)
        one.end, one.tokens = now, engine.text(slot)
        done.append(one)
        if users is not None and users + len(done) <= len(queue):
            open_at[users + len(done) - 1] = now

    while taken < len(queue) or busy:
        if not busy and open_at[taken] > now:
            now = open_at[taken]
        while taken < len(queue) and open_at[taken] <= now and len(busy) < engine.slots:
            slot = min(set(range(engine.slots)) - busy.keys())
            one = Served(queue[taken], open_at[taken], begun=now)
            seconds, ended = engine.begin(slot, one.request)
            now, busy[slot], taken = now + seconds, one, taken + 1
            one.first = now
            if ended:
                leave(slot)
        if not busy:
            continue
        happened = engine.round()
        now += happened.seconds
        rounds.append(happened)
        ends.append(now)
        for slot, one in list(busy.items()):
            one.num_tokens += int(happened.committed[slot])
            one.accepted.append(int(happened.accepted[slot]))
            if happened.confidence is not None:
                one.confidence.append(happened.confidence[slot])
            if happened.ended[slot]:
                leave(slot)
    return Report(done, rounds, ends)


def summary(report: Report) -> dict[str, float]:
    """What a server is judged by.

    `throughput` is tokens a second until the last request was begun, when slots begin
    to stay empty; of the whole time if no round had ended by then. `user_speed` is
    tokens a second of one request after its first token, pooled. `verified` and `paid`
    are tokens a request and round, its anchor included.
    """
    served, rounds = report.served, report.rounds
    until = max(s.begun for s in served)
    if not any(end <= until for end in report.ends):
        until = max(s.end for s in served)
    early = [r for r, end in zip(rounds, report.ends, strict=True) if end <= until]
    tokens = sum(int(r.committed.sum()) for r in early)
    tokens += sum(s.first <= until for s in served)
    live = sum(int(r.live.sum()) for r in rounds)
    total = lambda name: sum(int(np.sum(getattr(r, name))) for r in rounds)
    after = [(s.num_tokens - 1, s.end - s.first) for s in served if s.num_tokens > 1]
    count, seconds = np.sum(after, axis=0) if after else (math.nan, math.nan)
    waited = [s.first - s.arrival for s in served]
    return {
        "throughput": tokens / until,
        "user_speed": float(count / seconds),
        "first_token": float(np.mean(waited)),
        "first_token_95": float(np.quantile(waited, 0.95)),
        "per_token": float(seconds / count),
        "tau": total("committed") / live if live else math.nan,
        "verified": total("verified") / live if live else math.nan,
        "paid": total("paid") / live if live else math.nan,
        "live": live / len(rounds) if rounds else 0.0,
    }


# A row's own fields of a run; the others belong to all rows.
PER_ROW = (
    "cache",
    "state",
    "anchor",
    "tokens",
    "num_tokens",
    "limit",
    "reason",
    "keys",
    "valid",
)


@functools.partial(jax.jit, static_argnames=("slots",))
def _free(row: Progress, slots: int) -> Progress:
    """Slots that hold nothing, of the shapes of a row; their rounds are not traced."""
    many = lambda x: jnp.repeat(x, slots, axis=0)
    rows = {name: jax.tree.map(many, getattr(row, name)) for name in PER_ROW}
    rows["reason"] = jnp.full((slots,), LENGTH, jnp.int32)
    trace = jax.tree.map(lambda x: many(x)[:, :0], row.trace)
    return dataclasses.replace(row, trace=trace, **rows)


@functools.partial(jax.jit, donate_argnames=("pool",))
def place(
    pool: Progress, row: Progress, slot: int | Array, limit: int | Array
) -> Progress:
    """Puts a run of one row whole into a slot, to end at `limit` tokens."""
    limit = jnp.minimum(row.limit, limit)
    full = (row.reason == RUNNING) & (row.num_tokens >= limit)
    reason = jnp.where(full, LENGTH, row.reason)
    row = dataclasses.replace(row, limit=limit, reason=reason)
    put = lambda rows, one: rows.at[slot].set(one[0])
    fields = {
        name: jax.tree.map(put, getattr(pool, name), getattr(row, name))
        for name in PER_ROW
    }
    return dataclasses.replace(pool, **fields)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("pool",))
def _propose(model: Model, weights: Weights, pool: Progress):
    draft, pool = generate.propose(model, weights, pool)
    return draft, jnp.sum(draft.tokens != PAD, axis=1), pool


@functools.partial(
    jax.jit, static_argnames=("model", "width"), donate_argnames=("pool",)
)
def _settle(
    model: Model, weights: Weights, pool: Progress, draft: Draft, *, width: int
):
    """Settles drafts of which none has more than `width` nodes, its anchor included."""
    tree = model.drafter.tree
    if width < tree.num_nodes:
        tree, G = Tree.chain(width - 1), width - 1
        probs = None if draft.probs is None else draft.probs[:, :G]
        draft = Draft(tokens=draft.tokens[:, :G], probs=probs)
    pool, happened = generate.settle(model, weights, pool, draft, tree)
    counts = happened.num_accepted[:, 0], happened.num_committed[:, 0]
    return pool, (*counts, pool.reason, pool.valid)


class Batch:
    """Slots of real models. Methods change it; each reads the clock around its work."""

    def __init__(
        self,
        model: Model,
        weights: Weights,
        slots: int,
        *,
        max_new_tokens: int,
        prompt_width: int,
        widths: Sequence[int] | None = None,
        key: PRNGKey | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Compiles everything that a request may need.

        Args:
          max_new_tokens: the most that a request may ask for.
          prompt_width: the longest prompt, tokens.
          widths: nodes of a round that there is a program for; None: powers of two
            under a policy, else the drafter's whole tree alone.
        """
        tree = model.drafter.tree
        N = tree.num_nodes
        if widths is None:
            few = [2**i for i in range(N.bit_length()) if 2**i < N]
            widths = [*few, N] if model.policy is not None else [N]
        if sorted(widths)[-1] != N or min(widths) < 1:
            raise ValueError(
                f"widths must end with the draft's {N} nodes and be >= 1, got {widths}."
            )
        if len(widths) > 1 and not (isinstance(tree, Tree) and tree.is_chain):
            raise ValueError(
                f"only chains have narrower passes, and the draft is a tree of {N} "
                f"nodes; give widths=({N},)."
            )
        self.slots, self.widths = slots, tuple(sorted(widths))
        self.model, self.weights, self.clock = model, weights, clock
        # What a policy does not change is compiled once for all policies.
        self.plain = dataclasses.replace(model, policy=None)
        needed = prompt_width + max_new_tokens + N
        self.options = {
            "max_new_tokens": max_new_tokens,
            "key": jax.random.key(0) if key is None else key,
            "cache_size": math.ceil(needed / 128) * 128,
            "width": prompt_width,
        }
        pool = _free(self._start((0,), 0), slots)
        if model.policy is not None:
            pool = dataclasses.replace(pool, plan=model.policy.init())
        self.pool = pool
        self.live = np.zeros(slots, bool)
        self.seconds()

    def _start(self, prompt: Sequence[int], seed: int) -> Progress:
        args = self.plain, self.weights, [list(prompt)]
        return generate.start(*args, seeds=[seed], **self.options)

    def begin(self, slot: int, request: Request) -> tuple[float, bool]:
        if request.max_new_tokens > self.options["max_new_tokens"]:
            raise ValueError(
                f"a request asks for {request.max_new_tokens} tokens of a batch made "
                f"for {self.options['max_new_tokens']}. Raise its max_new_tokens."
            )
        began = self.clock()
        row = self._start(request.prompt, request.seed)
        self.pool = place(self.pool, row, slot, request.max_new_tokens)
        self.live[slot] = np.asarray(self.pool.reason)[slot] == RUNNING
        return self.clock() - began, not self.live[slot]

    def round(self) -> Round:
        began, live = self.clock(), self.live.copy()
        draft, lengths, self.pool = _propose(self.model, self.weights, self.pool)
        verified = np.where(live, 1 + np.asarray(lengths), 0)
        width = next(w for w in self.widths if w >= verified.max())
        accepted, committed, reason, valid = self._settle(draft, width)
        self.live = live & (reason == RUNNING)
        seconds = self.clock() - began
        if not np.all(valid[live]):
            raise ValueError(
                f"{type(self.model.drafter).__name__} proposed a token to which its "
                "own law gives probability 0."
            )
        sure = draft.confidence
        return Round(
            seconds=seconds,
            live=live,
            verified=verified,
            paid=width * self.slots,
            accepted=np.where(live, accepted, 0),
            committed=committed,
            ended=live & ~self.live,
            confidence=None if sure is None else np.asarray(sure),
        )

    def _settle(self, draft: Draft, width: int) -> list[np.ndarray]:
        args = self.plain, self.weights, self.pool, draft
        self.pool, found = _settle(*args, width=width)
        return [np.array(x) for x in found]

    def text(self, slot: int) -> list[int]:
        count = np.asarray(self.pool.num_tokens)[slot]
        return np.asarray(self.pool.tokens)[slot, :count].tolist()

    def seconds(self, repeats: int = 1) -> dict[str, Any]:
        """Medians of what the parts take, by turns; no slot may be busy.

        "begin" a request, "draft" of all slots, "verify" and commit by width.
        """
        assert not self.live.any(), "timing would go on with the requests"
        taken = collections.defaultdict(list)

        def timed(name, work):
            began = self.clock()
            found = work()
            taken[name].append(self.clock() - began)
            return found

        for _ in range(repeats):
            taken["begin"].append(self.begin(0, Request((0,), 1))[0])
            for width in self.widths:
                args = self.model, self.weights, self.pool
                draft, self.pool = timed("draft", lambda args=args: _drafted(*args))
                timed(width, lambda d=draft, w=width: self._settle(d, w))
        middle = {name: float(np.median(times)) for name, times in taken.items()}
        return {
            "begin": middle.pop("begin"),
            "draft": middle.pop("draft"),
            "verify": middle,
        }


def _drafted(model: Model, weights: Weights, pool: Progress):
    draft, lengths, pool = _propose(model, weights, pool)
    np.asarray(lengths)
    return draft, pool
