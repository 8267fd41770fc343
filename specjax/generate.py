"""The engine: prefill, then rounds of draft, verify and commit in one compiled loop.

A row holds `length` tokens whose keys and values are in the target's cache, and one
more, the anchor, that is text but not yet in the cache. A round

    draft    G tokens that may follow the anchor
    verify   one target pass over [anchor, drafts], N = G + 1 nodes; the verdict
    commit   n accepted drafts and one bonus token; length += n + 1; anchor = bonus

Rows are independent: each has its own length, key, budget and end. A row that has ended
runs on with the batch, commits nothing and writes only past its own length. The key of
a round is folded from the row's seed and the anchor's position, so a row's text depends
neither on its place in the batch nor on its neighbours.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributed, kv_cache, scheduler, sharding, verify
from specjax.drafters.none import NoDrafter
from specjax.kv_cache import KVCache
from specjax.metrics import Trace
from specjax.pytree import pytree
from specjax.sampling import GREEDY, Sampling
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Bool, Int, Keys, Params, PRNGKey
from specjax.verify import PAD, Draft

RUNNING, EOS, LENGTH = 0, 1, 2
REASONS = {RUNNING: "running", EOS: "eos", LENGTH: "length"}


@dataclasses.dataclass(frozen=True)
class Model:
    """The static half of a run: what is compiled in. Hashable by value."""

    target: Any  # targets.base.Target
    drafter: Any  # drafters.base.Drafter
    sampling: Sampling
    # Tokens that end a row and stay in its text. Traced: they never cause a compile.
    stop_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    rule: str | None = None  # of `verify.RULES`; None: the exact one that suits
    # How drafts are drawn; None: as the target's tokens are. Greedy settings propose
    # the likeliest children. Any setting is exact.
    draft_sampling: Sampling | None = None
    # A `scheduler.Policy`: where drafts stop, by the drafter's confidence. Under one
    # that looks at all rows a row's text depends on its neighbours, its law does not.
    policy: Any = None

    @property
    def drafting(self) -> Sampling:
        """The settings that drafts are drawn under."""
        if self.draft_sampling is not None:
            return self.draft_sampling
        if getattr(self.drafter, "propose", "sample") == "argmax":
            return GREEDY
        return self.sampling

    @property
    def rule_name(self) -> str:
        return self.rule or verify.default_rule(self.drafter.tree, self.drafting)


@pytree
class Weights:
    """The arrays of a run that no round changes."""

    target: Params
    drafter: Params


@pytree
class Progress:
    """A run between two rounds: everything that changes."""

    cache: KVCache  # the target's
    state: Any  # the drafter's
    plan: Any  # the policy's
    anchor: Int[Array, "B"]
    tokens: Int[Array, "B W"]  # the text so far, W = max_new_tokens, then PAD
    num_tokens: Int[Array, "B"]
    limit: Int[Array, "B"]  # tokens a row may have
    stop_ids: Int[Array, "X"]
    reason: Int[Array, "B"]  # RUNNING, EOS or LENGTH
    keys: Keys
    num_rounds: Int[Array, ""]
    trace: Trace
    valid: Bool[Array, "B"]  # False once a drafted token had q = 0


@dataclasses.dataclass(frozen=True)
class Generation:
    """A finished run, on the host."""

    tokens: list[list[int]]  # new tokens of each row, the stop token included
    finish_reasons: list[str]  # "eos" or "length"
    trace: Trace


def _round_keys(keys: Keys, position: Int[Array, "B"]) -> tuple[Keys, Keys]:
    """Independent keys of a round for drafting and for verifying."""
    folded = jax.vmap(jax.random.fold_in)(keys, position)
    pair = jax.vmap(lambda k: jax.random.split(k, 2))(folded)
    return pair[:, 0], pair[:, 1]


def _append(progress: Progress, new: Int[Array, "B N"], room: Int[Array, "B"]):
    """Cuts new tokens at a stop id and at the row's limit, and appends the rest.

    Returns the fields that change and how many tokens each row kept.
    """
    N, W = new.shape[1], progress.tokens.shape[1]
    slot = jnp.arange(N)
    is_stop = jnp.isin(new, progress.stop_ids)
    is_stop = is_stop & (slot[None] < room[:, None])
    first_stop = jnp.where(is_stop.any(1), jnp.argmax(is_stop, axis=1), N)
    count = jnp.minimum(room, first_stop + 1)
    count = jnp.minimum(count, progress.limit - progress.num_tokens)
    count = jnp.where(progress.reason == RUNNING, count, 0).astype(jnp.int32)

    at = jnp.where(
        slot[None] < count[:, None], progress.num_tokens[:, None] + slot[None], W
    )
    rows = jnp.arange(new.shape[0])[:, None]
    num_tokens = progress.num_tokens + count
    reason = jnp.where(num_tokens >= progress.limit, LENGTH, RUNNING)
    reason = jnp.where((count > 0) & (first_stop < count), EOS, reason)
    reason = jnp.where(progress.reason == RUNNING, reason, progress.reason)
    fields = {
        "tokens": progress.tokens.at[rows, at].set(new, mode="drop"),
        "num_tokens": num_tokens,
        "reason": reason.astype(jnp.int32),
    }
    return fields, count


def propose(
    model: Model, weights: Weights, progress: Progress
) -> tuple[Draft, Progress]:
    """The coming round's drafts as the policy stops them; the run after drafting."""
    running = progress.reason == RUNNING
    keys, _ = _round_keys(progress.keys, progress.cache.length)
    shared = model.target.shared(weights.target)
    draft, state = model.drafter.draft(
        weights.drafter,
        dataclasses.replace(shared, cache=progress.cache),
        progress.state,
        progress.anchor,
        model.drafting,
        keys,
    )
    plan = progress.plan
    if model.policy is not None:
        tree = model.drafter.tree
        draft, plan = scheduler.stop(model.policy, plan, draft, tree, running)
    return draft, dataclasses.replace(progress, state=state, plan=plan)


def settle(
    model: Model,
    weights: Weights,
    progress: Progress,
    draft: Draft,
    tree: Tree | DynamicTree,
) -> tuple[Progress, Trace]:
    """Verifies and commits what `propose` drafted, a draft of `tree`.

    Returns what happened beside the run, as the one column of a trace.
    """
    target, drafter, sampling = model.target, model.drafter, model.sampling
    shared = target.shared(weights.target)
    running = progress.reason == RUNNING
    _, verify_keys = _round_keys(progress.keys, progress.cache.length)

    with jax.named_scope("verify"):
        # A node that was not drafted is fed as token 0; nothing real sees it.
        drafted = jnp.maximum(draft.tokens, 0)
        nodes = jnp.concatenate([progress.anchor[:, None], drafted], axis=1)
        if isinstance(tree, Tree):
            ancestors, depths = tree.ancestors, tree.depths
        else:
            _, ancestors, depths = jax.vmap(lambda d: verify.topology(d, tree))(draft)
        out = target(
            weights.target,
            nodes,
            progress.cache,
            ancestors=ancestors,
            depths=depths,
            taps=drafter.taps,
        )
        logits = target.logits(weights.target, out.hidden)
        scores = logits if sampling.greedy else sampling.scores(logits)
        rule = verify.get(model.rule_name)
        judge = lambda d, z, k: verify.verify(d, z, sampling, k, tree, rule)
        verdict = jax.vmap(judge)(draft, scores, verify_keys)

    with jax.named_scope("commit"):
        n = verdict.num_accepted
        fields, count = _append(progress, verdict.tokens, verdict.num_committed)
        bonus = jnp.take_along_axis(verdict.tokens, n[:, None], axis=1)[:, 0]
        # What a stop id or the limit cut off is not committed either: count - 1 drafts
        # and, on a row that had ended, nothing at all (-1).
        kept = dataclasses.replace(verdict, num_accepted=count - 1)
        path = verdict.path
        features = sharding.constrain(out.features, sharding.ROWS)
        cache = kv_cache.commit(out.cache, path, kept.num_committed)
        if path is not None:
            rows = jnp.arange(len(n))[:, None]
            nodes, features = nodes[rows, path], features[rows, path]
        state = drafter.commit(
            weights.drafter, shared, progress.state, kept, nodes, features
        )
        whole = count == verdict.num_committed
        shown = jax.vmap(lambda d, v: verify.followed(d, v, tree))(draft, verdict)
        after = jnp.pad(shown, ((0, 0), (0, 1)), constant_values=PAD)
        refused = after[jnp.arange(len(n)), n] != PAD
        happened = Trace(
            num_accepted=jnp.minimum(n, count)[:, None],
            num_committed=count[:, None],
            rejected=(whole & refused)[:, None],
            drafted=shown[:, None],
        )
    progress = dataclasses.replace(
        progress,
        cache=cache,
        state=state,
        anchor=jnp.where(running, bonus, progress.anchor),
        valid=progress.valid & (verdict.valid | ~running),
        **fields,
    )
    return progress, happened


def _round(model: Model, weights: Weights, progress: Progress) -> Progress:
    """One round of every row."""
    i, trace = progress.num_rounds, progress.trace
    with jax.named_scope("draft"):
        draft, progress = propose(model, weights, progress)
    progress, happened = settle(model, weights, progress, draft, model.drafter.tree)
    put = lambda whole, column: whole.at[:, i].set(column[:, 0])
    trace = jax.tree.map(put, trace, happened)
    return dataclasses.replace(progress, num_rounds=i + 1, trace=trace)


@functools.partial(jax.jit, static_argnames=("model", "cache_size", "max_new_tokens"))
def prefill(
    model: Model,
    weights: Weights,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    keys: Keys,
    stop_ids: Int[Array, "X"],
    *,
    cache_size: int,
    max_new_tokens: int,
) -> Progress:
    """Reads the prompts (right-padded), draws the first token, readies the drafter."""
    target, drafter = model.target, model.drafter
    B, W, D = prompts.shape[0], max_new_tokens, drafter.tree.depth
    shared = target.shared(weights.target)
    cache = target.init_cache(B, cache_size, weights.target["embed"].dtype)
    cache = sharding.constrain_rows(cache, B)
    out = target(weights.target, prompts, cache, taps=drafter.taps)
    last = out.hidden[jnp.arange(B), lengths - 1]
    _, first_keys = _round_keys(keys, lengths - 1)
    probs = model.sampling.probs(target.logits(weights.target, last))
    first = jax.vmap(model.sampling.pick)(probs, first_keys)
    max_positions = target.config.max_positions
    state = drafter.prefill(
        weights.drafter, shared, prompts, lengths, out.features, cache_size
    )
    progress = Progress(
        cache=kv_cache.commit(out.cache, None, lengths),
        state=sharding.constrain_rows(state, B),
        plan=() if model.policy is None else model.policy.init(),
        anchor=first,
        tokens=jnp.full((B, W), PAD, jnp.int32),
        num_tokens=jnp.zeros((B,), jnp.int32),
        limit=jnp.minimum(W, max_positions - lengths).astype(jnp.int32),
        stop_ids=stop_ids,
        reason=jnp.full((B,), RUNNING, jnp.int32),
        keys=keys,
        num_rounds=jnp.zeros((), jnp.int32),
        trace=Trace(
            num_accepted=jnp.zeros((B, W), jnp.int32),
            num_committed=jnp.zeros((B, W), jnp.int32),
            rejected=jnp.zeros((B, W), bool),
            drafted=jnp.full((B, W, D), PAD, jnp.int32),
        ),
        valid=jnp.ones((B,), bool),
    )
    one = jnp.ones((B,), jnp.int32)
    fields, _ = _append(progress, first[:, None], one)
    return dataclasses.replace(progress, **fields)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("progress",))
def advance(
    model: Model, weights: Weights, progress: Progress, rounds: Int[Array, ""]
) -> Progress:
    """Runs up to `rounds` rounds, until every row has ended. `progress` is donated."""
    end = progress.num_rounds + rounds

    def go_on(progress):
        return jnp.any(progress.reason == RUNNING) & (progress.num_rounds < end)

    return jax.lax.while_loop(
        go_on, lambda progress: _round(model, weights, progress), progress
    )


def pad_prompts(
    prompts: Sequence[Sequence[int]], width: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads prompts to `width` tokens, or a multiple of 32: few shapes compile."""
    if not prompts or any(len(p) == 0 for p in prompts):
        raise ValueError(
            "every prompt needs at least one token; give the BOS or a chat turn."
        )
    lengths = np.array([len(p) for p in prompts], np.int32)
    longest = int(lengths.max())
    padded = max(width or math.ceil(longest / 32) * 32, longest)
    tokens = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def check(model: Model) -> None:
    """Refuses a rule that is not exact on a model's drafts, a tree too wide and layers
    that the target lacks."""
    tree, V = model.drafter.tree, model.target.config.vocab_size
    verify.check(model.rule_name, tree, model.drafting)
    widest = tree.width if isinstance(tree, DynamicTree) else tree.children.shape[1]
    if widest > V:
        raise ValueError(
            f"the tree has {widest} children under a node, the target {V} ids. Make "
            "it narrower."
        )
    L = model.target.config.num_layers
    if far := [t for t in model.drafter.taps if not -L <= t + 1 <= L + 1]:
        raise ValueError(
            f"the drafter reads states {far} of a target that has 0 to {L}: it belongs "
            "to a deeper one. Give that target."
        )


def start(
    model: Model,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    key: PRNGKey | None = None,
    seeds: Sequence[int] | None = None,
    cache_size: int | None = None,
    width: int | None = None,
) -> Progress:
    """Checks the request and prefills it.

    Args:
      prompts: token ids of each row.
      max_new_tokens: most new tokens a row; a row also ends at the target's last
        position.
      seeds: one number a row; its text depends on the key and this alone (0, 1, ...).
      cache_size: slots a row, S; None takes what is needed, rounded up.
      width: tokens that prompts are padded to: one compiled prefill for many calls.
    """
    config = model.target.config
    check(model)
    tokens, lengths = pad_prompts(prompts, width)
    N = model.drafter.tree.num_nodes
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}.")
    if lengths.max() >= config.max_positions:
        raise ValueError(
            f"prompt of {lengths.max()} tokens leaves no room in the target's "
            f"{config.max_positions} positions. Shorten it."
        )
    # What is beyond the target's positions would be allocated and never used.
    max_new_tokens = min(max_new_tokens, config.max_positions)
    for row in prompts:
        if not 0 <= min(row) <= max(row) < config.vocab_size:
            raise ValueError(
                f"prompt ids span {min(row)} to {max(row)}; the target knows 0 to "
                f"{config.vocab_size - 1}. Use the target's own tokenizer."
            )
    reach, limit = int(lengths.max()) + max_new_tokens, model.drafter.max_positions
    if limit is not None and reach > limit:
        warnings.warn(
            f"{type(model.drafter).__name__} was made for {limit} positions; the "
            f"text may reach {reach}: still exact, but acceptance may fall past it.",
            stacklevel=2,
        )
    needed = max(int(lengths.max()) + max_new_tokens + N, tokens.shape[1])
    size = cache_size or math.ceil(needed / 128) * 128
    if needed > size:
        raise ValueError(
            f"prompt ({lengths.max()}) + max_new_tokens ({max_new_tokens}) + N ({N}) "
            f"exceed the cache: {needed} > S={size}. Raise cache_size."
        )
    seeds = range(len(prompts)) if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise ValueError(
            f"{len(seeds)} seeds for {len(prompts)} prompts; give one each."
        )
    key = jax.random.key(0) if key is None else key
    keys = jax.vmap(lambda s: jax.random.fold_in(key, s))(jnp.asarray(seeds, jnp.int32))
    return prefill(
        model,
        weights,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        keys,
        jnp.asarray(model.stop_ids, jnp.int32),
        cache_size=size,
        max_new_tokens=max_new_tokens,
    )


def finish(model: Model, progress: Progress) -> Generation:
    """Brings a run to the host."""
    valid = distributed.fetch(progress.valid)
    if not np.all(valid):
        rows = np.flatnonzero(~valid).tolist()
        raise ValueError(
            f"{type(model.drafter).__name__} proposed a token to which its own law "
            f"gives probability 0 (rows {rows}): Draft.probs must be the law that "
            "Draft.tokens were drawn from."
        )
    tokens, counts = map(distributed.fetch, (progress.tokens, progress.num_tokens))
    return Generation(
        tokens=[row[:n].tolist() for row, n in zip(tokens, counts, strict=True)],
        finish_reasons=[REASONS[int(r)] for r in distributed.fetch(progress.reason)],
        trace=jax.tree.map(
            lambda x: distributed.fetch(x)[:, : int(progress.num_rounds)],
            progress.trace,
        ),
    )


def generate(
    model: Model, weights: Weights, prompts: Sequence[Sequence[int]], **options: Any
) -> Generation:
    """Generates to the end; `options` are those of `start`."""
    progress = start(model, weights, prompts, **options)
    everything = progress.tokens.shape[1]
    return finish(model, advance(model, weights, progress, jnp.asarray(everything)))


def stream(
    model: Model,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    *,
    rounds: int = 1,
    **options: Any,
) -> Iterator[Generation]:
    """Yields the run so far after the prefill and after every few rounds."""
    progress = start(model, weights, prompts, **options)
    yield finish(model, progress)
    while np.any(distributed.fetch(progress.reason) == RUNNING):
        progress = advance(model, weights, progress, jnp.asarray(rounds))
        yield finish(model, progress)


def autoregressive(model: Model) -> Model:
    """The same run without a drafter: the baseline."""
    return Model(model.target, NoDrafter(), model.sampling, model.stop_ids)
