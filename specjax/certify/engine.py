"""The certificate of drafters: real drafts, real target passes, the real engine.

Two looks at a drafter over a random target of four ids, whose law is enumerated:

    exact     all drafts the drafter makes from one state, each with the probability
              that its own laws give it and the target's laws from the verify pass; a
              rule's law is summed over all of it (`exact.commit_law`). The drafts must
              also occur as often as they say: a chi-square of their counts.
    sampled   thousands of rows through `generate`, several rounds each: a chi-square
              of the joint of their first tokens. What only this sees is the engine:
              keys, caches, commits, rows.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import kv_cache, scheduler, testing, verify
from specjax.certify import exact
from specjax.drafters.none import NoDrafter
from specjax.generate import Model, Weights, advance, finish, start
from specjax.metrics import accepted_per_round
from specjax.sampling import GREEDY, Sampling
from specjax.testing import FALSE_ALARM, FAST, chi_square
from specjax.tree import DynamicTree, Tree
from specjax.verify import Draft

TOPOLOGIES: dict[str, Tree | DynamicTree | None] = {
    "chain": None,
    "tree": Tree((-1, 0, 0, 1)),
    "dynamic": DynamicTree(num_nodes=5, depth=2, width=2),
}
RULES_OF = {  # and the kinds of drafts each is for
    "chain": ("token", "block", "match"),
    "tree": ("recursive", "traversal", "match"),
    "dynamic": ("match",),
}
PROMPT = [1, 0, 2, 1]
ROWS = 4096
NUM_TOKENS = 4  # holds a whole round of two drafts, its bonus and the next anchor
VOCAB = 4


@dataclasses.dataclass(frozen=True)
class Kit:
    """A random target and a drafter over it."""

    target: Any
    params: Any
    drafter: Any
    weights: Any


@functools.lru_cache(maxsize=32)
def target_kit(seed: int = 0):
    return testing.tiny_target(
        seed,
        scale=12.0,
        vocab_size=VOCAB,
        num_layers=2,
        width=8,
        num_heads=2,
        num_kv_heads=1,
        head_width=4,
        mlp_width=8,
    )


@functools.lru_cache(maxsize=32)
def kit(name: str, topology: str = "chain", seed: int = 0) -> Kit:
    """A registered drafter of two tokens, with a law flat enough to be accepted."""
    target, params = target_kit(seed)
    fields: dict[str, Any] = {"gamma": 2}
    drafter, weights = testing.tiny_drafter(name, target, params, seed + 1, **fields)
    # Small weights give a flat law, which keeps whole drafts often enough to judge the
    # bonus behind them.
    weak = lambda x: np.float32(0.1) * np.asarray(x)
    weights = testing.perturb(jax.tree.map(weak, weights), seed)
    if TOPOLOGIES[topology] is not None:
        drafter = dataclasses.replace(drafter, topology=TOPOLOGIES[topology])
    return Kit(target, params, drafter, weights)


def kind(tree: Tree | DynamicTree) -> str:
    """Which of `TOPOLOGIES` stands for a drafter's own."""
    if isinstance(tree, DynamicTree):
        return "dynamic"
    return "chain" if tree.is_chain else "tree"


def has_topology(name: str, topology: str) -> bool:
    """Whether a drafter can draft so."""
    fields = {f.name for f in dataclasses.fields(kit(name).drafter)}
    return topology == "chain" or "topology" in fields


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), compiler_options=FAST)
def draw_many(target, drafter, sampling, rows: int, params, weights, prompt, key):
    """Drafts of one state under many keys; the prompt's last token is the anchor."""
    shared, text = target.shared(params), prompt[:, :-1]
    lengths = jnp.full((1,), text.shape[1], jnp.int32)
    size = text.shape[1] + drafter.tree.num_nodes + 2
    out = target(params, text, target.init_cache(1, size), taps=drafter.taps)
    cache = kv_cache.commit(out.cache, None, lengths)
    state = drafter.prefill(weights, shared, text, lengths, out.features, size)
    many = lambda x: jnp.repeat(x, rows, axis=0)
    state, cache = jax.tree.map(many, (state, cache))
    shared = dataclasses.replace(shared, cache=cache)
    anchor = jnp.repeat(prompt[:, -1], rows)
    keys = jax.random.split(key, rows)
    return drafter.draft(weights, shared, state, anchor, sampling, keys)[0]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=FAST)
def _judged(target, tree, params, prompt, draft):
    """The target's logits at the nodes of drafts that follow one prompt [R N V]."""
    rows, text = len(draft.tokens), prompt[:, :-1]
    cache = target(params, text, target.init_cache(1, 32)).cache
    cache = kv_cache.commit(cache, None, jnp.full((1,), text.shape[1], jnp.int32))
    cache = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), cache)
    anchor = jnp.repeat(prompt[:, -1:], rows, axis=0)
    nodes = jnp.concatenate([anchor, jnp.maximum(draft.tokens, 0)], axis=1)
    _, ancestors, depths = jax.vmap(lambda d: verify.topology(d, tree))(draft)
    out = target(params, nodes, cache, ancestors=ancestors, depths=depths)
    return target.logits(params, out.hidden)


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST)
def _probs(sampling, logits):
    return sampling.probs(logits)


@functools.lru_cache(maxsize=64)
def proposals(name: str, topology: str, drafting: Sampling, seed: int = 0):
    """The distinct drafts, how often each came, and the logits at their nodes.

    The last one is repeated, with a count of 0, up to a power of 4.
    """
    k = kit(name, topology, seed)
    prompt = jnp.asarray([PROMPT], jnp.int32)
    args = k.params, k.weights, prompt, jax.random.key(seed)
    draft = draw_many(k.target, k.drafter, drafting, ROWS, *args)
    columns = [np.asarray(draft.tokens)]
    if draft.parents is not None:
        columns.append(np.asarray(draft.parents))
    _, first, counts = np.unique(
        np.concatenate(columns, axis=1), axis=0, return_index=True, return_counts=True
    )
    # Few sizes, so that drafters share the compiled pass and rules.
    size = 4 ** math.ceil(math.log(len(first), 4))
    at = np.pad(first, (0, size - len(first)), mode="edge")
    counts = np.pad(counts, (0, size - len(first)))
    few = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[at]), draft)
    logits = _judged(k.target, k.drafter.tree, k.params, prompt, few)
    return few, counts, np.asarray(logits)


@functools.lru_cache(maxsize=32)
def joint(sampling: Sampling, num_tokens: int, seed: int = 0) -> np.ndarray:
    """The target's law of the tokens after the prompt."""
    target, params = target_kit(seed)
    return testing.target_law(target, params, PROMPT, sampling, num_tokens)


def drafting(name: str, rule: str, sampling: Sampling) -> Sampling:
    """How drafts for a rule are drawn: `match` gets the likeliest, its best use."""
    argmax = getattr(kit(name).drafter, "propose", "sample") == "argmax"
    drawn = verify.get(rule).drawn
    if drawn and not argmax:
        return sampling
    return sampling if drawn else GREEDY


def exact_law(
    name: str, rule: verify.Rule, topology: str, drafting: Sampling, sampling: Sampling
) -> tuple[float, float]:
    """Distance of a rule's law of three tokens from the target's, and mean accepted.

    Probability of drafts that were never seen counts as distance.
    """
    few, counts, logits = proposals(name, topology, drafting)
    tree = kit(name, topology).drafter.tree
    p = np.asarray(_probs(sampling, logits))
    chance = _chance(tree, few, drafting, counts)
    right = joint(sampling, tree.depth + 1)
    law, accepted = exact.commit_law(rule, tree, few, chance, p, right)
    return max(exact.tv(law, right), 1 - float(chance.sum())), accepted


@dataclasses.dataclass(frozen=True)
class Stopped:
    """The outcome of one `stopped_law`."""

    distance: float  # of the law of three tokens from the target's
    lengths: set[int]  # that drafts were stopped at: a single one would test nothing


def gives_confidence(name: str, drafting: Sampling) -> bool:
    """Whether drawn drafts of a chain say how likely they are accepted."""
    if drafting.greedy:
        return False
    return proposals(name, "chain", drafting)[0].confidence is not None


def stopped_law(
    name: str, rule: str, sampling: Sampling, *, look_ahead: bool = False
) -> Stopped:
    """`exact_law` of drawn drafts that end before a second token which is unsure.

    With `look_ahead` the first token ends with it, which is wrong: how sure the second
    one is depends on the first.
    """
    few, counts, logits = proposals(name, "chain", sampling)
    assert few.confidence is not None
    p = np.asarray(sampling.probs(jnp.asarray(logits)))
    sure = np.asarray(few.confidence)[:, 1]
    seen = (sure >= np.median(sure[counts > 0])).astype(np.int32)
    lengths = 2 * seen if look_ahead else 1 + seen
    tree, right = kit(name).drafter.tree, joint(sampling, 3)
    chance = _chance(tree, few, sampling, counts)
    stopped = scheduler.cut(few, jnp.asarray(lengths))
    law, _ = exact.commit_law(verify.get(rule), tree, stopped, chance, p, right)
    distance = max(exact.tv(law, right), 1 - float(chance.sum()))
    return Stopped(distance, set(lengths[counts > 0].tolist()))


def _chance(tree, few: Draft, drafting: Sampling, counts) -> np.ndarray:
    if drafting.greedy:  # one draft; a second one would be no function of the text
        return counts / counts.sum() * (1.0 if np.sum(counts > 0) == 1 else 0.5)
    return np.where(counts > 0, exact.chance_of(tree, few), 0.0)


def drafts_p_value(name: str, topology: str, drafting: Sampling) -> float:
    """p-value that drafts are drawn from the laws they carry."""
    few, counts, _ = proposals(name, topology, drafting)
    chance = _chance(kit(name, topology).drafter.tree, few, drafting, counts)
    # Drafts that never came stand in one cell.
    chance = np.append(chance, max(1 - chance.sum(), 0.0))
    return chi_square(np.append(counts, 0), chance)


def drawn_p_value(
    drafter: Any,
    weights: Any,
    target: Any,
    params: Any,
    prompt: list[int],
    drafting: Sampling,
    seed: int = 0,
) -> float:
    """p-value that a drafter, as it is, draws its tokens from the laws it carries.

    Many keys from one state. Where x was drawn from q, F(x - 1) + u q(x) is uniform, F
    being the sum of q up to an id, whatever q is and however many ids there are; a
    chi-square of these numbers over 16 bins a node. 1 for likeliest children: they are
    no draws.
    """
    tree = drafter.tree
    if drafting.greedy or isinstance(tree, DynamicTree):
        return 1.0
    V = target.config.vocab_size
    rows = max(64, min(1024, 2**24 // (V * max(len(tree.inner), 1))))
    key, noise = jax.random.key(seed), np.random.default_rng(seed)
    args = params, weights, jnp.asarray([prompt], jnp.int32), key
    draft = draw_many(target, drafter, drafting, rows, *args)
    probs = np.asarray(draft.laws, np.float64)
    tokens = np.asarray(draft.tokens)
    counts = np.zeros((tree.num_nodes - 1, 16), np.int64)
    for i, inner in enumerate(tree.inner):
        q = probs[:, i].copy()
        for kid in tree.children[inner]:
            x = tokens[:, kid - 1]
            real = np.flatnonzero(x >= 0) if kid >= 0 else np.zeros(0, int)
            if not len(real):
                continue
            law, at = q[real] / q[real].sum(1, keepdims=True), x[real]
            share = law[np.arange(len(at)), at]
            below = np.cumsum(law, axis=1)[np.arange(len(at)), at] - share
            place = below + noise.random(len(at)) * share
            bins = np.clip((place * 16).astype(int), 0, 15)
            counts[kid - 1] += np.bincount(bins, minlength=16)
            if np.any(share == 0):
                return 0.0
            if not tree.replacement:
                q[real, at] = 0
    per_node = counts.sum(1, keepdims=True) / 16
    return chi_square(counts, np.broadcast_to(per_node, counts.shape))


def own_drafts_p_value(name: str, drafting: Sampling) -> float:
    """`drawn_p_value` of a registered drafter with its default number of tokens."""
    target, params = target_kit()
    drafter, weights = testing.tiny_drafter(name, target, params, 1)
    weights = testing.perturb(weights)
    return drawn_p_value(drafter, weights, target, params, PROMPT, drafting)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The outcome of one `sampled`."""

    p_value: float  # of the joint of the first tokens
    pair_p_value: float  # of neighbouring rows' first tokens being independent
    passed: bool
    rows: int  # texts generated
    accepted: float  # mean drafted tokens accepted per round: 0 would test little
    texts: np.ndarray  # [rows NUM_TOKENS]


def sampled(
    name: str,
    sampling: Sampling,
    *,
    rule: str | None = None,
    topology: str = "chain",
    policy: Any = None,
    rows: int = ROWS,
    seed: int = 0,
    fixture: int = 0,
    false_alarm: float = FALSE_ALARM,
) -> Certificate:
    """Checks by sampling that the engine with a drafter keeps the target's law.

    It fails a right drafter with probability 2 `false_alarm`. At temperature 0 compare
    texts instead, which is exact. `fixture` chooses the random target and drafter.
    """
    if sampling.greedy:
        raise ValueError(
            f"this certificate needs a sampled law, got {sampling}; for greedy "
            "decoding compare the text with that of `generate.autoregressive`."
        )
    k, prompts = kit(name, topology, fixture), [PROMPT] * rows
    run = _run(k, sampling, rule, prompts, range(rows), seed, policy=policy)
    texts = np.array([tokens[:NUM_TOKENS] for tokens in run.tokens])
    law = joint(sampling, NUM_TOKENS, fixture)
    p_value = chi_square(testing.count(texts, VOCAB), law)
    first = law.sum(axis=tuple(range(2, NUM_TOKENS)))  # of two tokens
    neighbours = np.concatenate([texts[0::2, :2], texts[1::2, :2]], axis=1)
    pairs = first[:, :, None, None] * first[None, None]
    pair_p_value = chi_square(testing.count(neighbours, VOCAB), pairs)
    return Certificate(
        p_value=p_value,
        pair_p_value=pair_p_value,
        passed=min(p_value, pair_p_value) >= false_alarm,
        rows=rows,
        accepted=accepted_per_round(run.trace),
        texts=texts,
    )


def moved(
    name: str,
    sampling: Sampling,
    texts: np.ndarray,
    *,
    rule: str | None = None,
    topology: str = "chain",
    seed: int = 0,
) -> float:
    """Share of rows whose text changes with their place, neighbours and padding.

    `texts` are those of `sampled`. Its rows are run again in another order, every
    second one beside another prompt, in wider padding.
    """
    rows = len(texts)
    order = np.random.default_rng(seed).permutation(rows)
    kept = order % 2 == 0
    prompts = [PROMPT if k else [2, 3, 3] for k in kept]
    k = kit(name, topology)
    run = _run(k, sampling, rule, prompts, order, seed, width=12)
    again = [tokens[:NUM_TOKENS] for tokens in run.tokens]
    same = [again[i] == texts[row].tolist() for i, row in enumerate(order) if kept[i]]
    return 1 - float(np.mean(same))


def _run(k: Kit, sampling, rule, prompts, seeds, seed, width=8, policy=None):
    model = Model(k.target, k.drafter, sampling, rule=rule, policy=policy)
    if rule is not None and not verify.get(rule).drawn:
        model = dataclasses.replace(model, draft_sampling=GREEDY)
    arrays = Weights(target=k.params, drafter=k.weights)
    progress = start(
        model,
        arrays,
        prompts,
        max_new_tokens=NUM_TOKENS + 1,  # the end of the text must not hide the bonus
        key=jax.random.key(seed),
        seeds=[int(s) for s in seeds],
        cache_size=32,
        width=width,
    )
    everything = jnp.asarray(NUM_TOKENS)
    rounds = _compiled(model, arrays, progress, everything)
    return finish(model, rounds(arrays, progress, everything))


_CACHE: dict[Any, Any] = {}


def _compiled(model: Model, *args):
    """`advance`, compiled fast, once for a model and shapes."""
    at = model, verify.RULES[model.rule_name], str(jax.tree.map(jnp.shape, args))
    if at not in _CACHE:
        _CACHE[at] = advance.lower(model, *args).compile(FAST)
    return _CACHE[at]


def greedy_difference(name: str, topology: str) -> float:
    """Share of prompts whose greedy text differs from the target's own."""
    k = kit(name, topology)
    weights = Weights(target=k.params, drafter=k.weights)
    ours = _greedy(Model(k.target, k.drafter, GREEDY), weights)
    plain = _plain_text()
    return float(np.mean([a != b for a, b in zip(ours, plain, strict=True)]))


def _greedy(model: Model, weights: Weights) -> list[list[int]]:
    prompts = np.random.default_rng(0).integers(0, VOCAB, (16, 5)).tolist()
    progress = start(model, weights, prompts, max_new_tokens=12)
    rounds = _compiled(model, weights, progress, jnp.asarray(12))
    return finish(model, rounds(weights, progress, jnp.asarray(12))).tokens


@functools.lru_cache(maxsize=1)
def _plain_text() -> list[list[int]]:
    target, params = target_kit()
    return _greedy(Model(target, NoDrafter(), GREEDY), Weights(params, None))
