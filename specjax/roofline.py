"""Times of passes and drafts on accelerators that are not at hand, from shapes alone.

A pass over n tokens of R rows, each with S tokens in the cache, on P chips that split
every matrix between them takes

    max(bytes of weights / (P bw), flops with them / (P peak))                      (1)
    + max(bytes of the cache / (Q bw), flops over it / (P peak))                    (2)
    + reductions (latency + 2 (P - 1) / P n D 2 bytes / link)     if P > 1          (3)
    + overhead of a pass

with bw and peak the shares that are achieved of the chip's own. Q is the number of
chips among which the cache can be split: one a key head, so 1 for latent attention.
Reductions are the all-reduces of tensor parallelism (Shoeybi et al. 2019,
arXiv:1909.08053): one after every product with weights whose outputs are the stream
(two a layer; experts and a shared one are summed before) or the vocabulary; each chip
sends 2 (P - 1)/P of n D bfloat16 numbers at the rate of one direction of its link.
Weights are read once a pass. Of X experts with k a token, n tokens touch

    X (1 - (1 - k/X)^n)                                                             (4)

if all are chosen alike; real routers are less even and touch fewer. Each token sees all
S tokens, or the last W in a layer with a window.

What is multiplied is counted in the traced programs themselves (`work`), the target's
pass and the drafter's `draft` and `commit`: a new drafter needs no formula. Not
counted: norms and other element-wise work, sampling, embedding rows, activations.
Drafts attend to the whole context even where the drafter has windows.

The shares and the latency are not the vendor's. The defaults were set to the only
published table that names all that is needed: decoding of Llama-2 7B and 70B by
`gpt-fast` on 1 to 8 A100-80GB (README, commit 0f925b5; batch 1, bfloat16; power capped
to 330 W, no NVSwitch): 0.7 of the bandwidth and 25 us an all-reduce give its seven
times within 11 %. The overhead of a pass (20 us) and the share of peak (0.5) are
guesses; a verify pass of few rows is far from the latter. Measure your own.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cost, drafters, targets
from specjax.drafters.base import Drafter
from specjax.gemma import GemmaConfig
from specjax.mla import DeepSeekConfig
from specjax.sampling import GREEDY
from specjax.targets import convert
from specjax.transformer import TransformerConfig
from specjax.verify import Verdict
from specjax.work import Ends, Work, count


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator as its vendor describes it."""

    flops: float  # dense bfloat16 a second
    bandwidth: float  # bytes of its memory a second
    memory: float  # bytes
    link: float  # bytes a second to other chips, both directions together


# Dense rates (data sheets of GPUs print twice as much, with sparsity). A100 80GB SXM,
# H100 SXM, H200 SXM, B200 (HGX: 8 chips have 36 PFLOP/s with sparsity, 1.4 TB, 64 TB/s)
# and L40S: NVIDIA's data sheets; MI300X: AMD's. TPUs: docs.cloud.google.com/tpu/docs,
# pages v5e, v5p, v6e and tpu7x, ICI per chip (GiB where they say so).
CHIPS: dict[str, Chip] = {
    "a100": Chip(312e12, 2.039e12, 80e9, 600e9),
    "h100": Chip(989e12, 3.35e12, 80e9, 900e9),
    "h200": Chip(989e12, 4.8e12, 141e9, 900e9),
    "b200": Chip(2250e12, 8e12, 180e9, 1800e9),
    "l40s": Chip(362e12, 0.864e12, 48e9, 64e9),
    "mi300x": Chip(1307e12, 5.3e12, 192e9, 896e9),
    "v5e": Chip(197e12, 0.819e12, 16e9, 400e9),
    "v5p": Chip(459e12, 2.765e12, 102e9, 1200e9),
    "v6e": Chip(918e12, 1.638e12, 32e9, 800e9),
    "v7x": Chip(2307e12, 7.38e12, 206.2e9, 1200e9),
}


def _stack(V, D, L, H, K, E, F, positions, tie=False, **fields) -> TransformerConfig:
    return TransformerConfig(
        V, D, L, H, K, E, F, tie_embeddings=tie, max_positions=positions, **fields
    )


_llama = functools.partial(_stack, 128256, positions=131072)
_qwen = functools.partial(_stack, 151936, positions=40960, qk_norm=True)

# Shapes of the published config.json files.
MODELS: dict[str, TransformerConfig] = {
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 64, 8192, tie=True),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 128, 8192, tie=True),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 128, 14336),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 128, 28672),
    "llama-3.1-405b": _llama(16384, 126, 128, 8, 128, 53248),
    "qwen3-0.6b": _qwen(1024, 28, 16, 8, 128, 3072, tie=True),
    "qwen3-1.7b": _qwen(2048, 28, 16, 8, 128, 6144, tie=True),
    "qwen3-4b": _qwen(2560, 36, 32, 8, 128, 9728, tie=True),
    "qwen3-8b": _qwen(4096, 36, 32, 8, 128, 12288),
    "qwen3-14b": _qwen(5120, 40, 40, 8, 128, 17408),
    "qwen3-32b": _qwen(5120, 64, 64, 8, 128, 25600),
    "smollm2-135m": _stack(49152, 576, 30, 9, 3, 64, 1536, 8192, tie=True),
    "deepseek-v3": DeepSeekConfig(
        129280, 7168, 61, 128, 1, 64, 18432, max_positions=163840
    ),
}


def check_share(name: str, value: float) -> None:
    """Refuses a share of a chip's own speed that there cannot be."""
    if not 0 < value <= 1:
        raise ValueError(
            f"{name} is a share of the chip's own, above 0 and at most 1; got {value}."
        )


@dataclasses.dataclass(frozen=True)
class Setup:
    """Where and how a model is served."""

    chip: Chip
    chips: int = 1
    context: int = 2048  # tokens of a row in the cache
    batch: int = 1  # rows
    weight_bytes: float = 2.0  # a number of the weights
    cache_bytes: float = 2.0
    bandwidth_share: float = 0.7  # achieved of the chip's
    compute_share: float = 0.5
    collective: float = 25e-6  # seconds before an all-reduce moves its first byte
    overhead: float = 20e-6  # seconds of a pass beside its products

    def __post_init__(self):
        for name in ("chips", "context", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"a plan needs {name} >= 1, got {getattr(self, name)}")
        for name in ("bandwidth_share", "compute_share"):
            check_share(name, getattr(self, name))
        for name in ("weight_bytes", "cache_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}.")
        for name in ("collective", "overhead"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be >= 0 seconds, got {getattr(self, name)}."
                )


def _shapes(tree: Any) -> Any:
    """Shapes of weights in bfloat16, as they are served."""
    cast = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    return jax.tree.map(cast, tree)


def attention(config: TransformerConfig, context: int) -> tuple[float, float]:
    """Numbers of the cache that a row reads in a pass, and flops of one token over it.

    Of latent attention in the form of eq. 5 of `mla`, where nothing is expanded.
    """
    target = convert.target_of(config)
    cache = jax.eval_shape(lambda: target.init_cache(1, 1))
    numbers = flops = 0
    for i in range(config.num_layers):
        at = config.source(i) if isinstance(config, GemmaConfig) else i
        seen = min(context, config.window(i) or context)
        (_, K, _, key), value = cache.k[at].shape, cache.v[at].shape[3]
        numbers += seen * K * (key + value)
        if isinstance(config, DeepSeekConfig):
            value = config.kv_rank
        flops += 2 * seen * config.num_heads * (key + value)
    return float(numbers), float(flops)


@dataclasses.dataclass(frozen=True)
class Part:
    """Where the seconds of a pass or a draft go."""

    weights: float  # eq. 1
    cache: float  # eq. 2
    collectives: float  # eq. 3
    overhead: float
    bound: str  # of eq. 1: "memory" or "compute"

    @property
    def seconds(self) -> float:
        return self.weights + self.cache + self.collectives + self.overhead


class Plan:
    """A target of a published shape on named chips, without its weights."""

    def __init__(self, config: TransformerConfig, setup: Setup):
        self.config, self.setup = config, setup
        if setup.context > config.max_positions:
            raise ValueError(
                f"context {setup.context} is more than the model's "
                f"{config.max_positions} positions; give fewer."
            )
        self.target = convert.target_of(config)
        start = jax.eval_shape(lambda: self.target.init(jax.random.key(0)))
        self.params, tables = _shapes(start), jax.eval_shape(self.target.shared, start)
        self.start, self.shared = tables, _shapes(tables)  # in float32, as served
        self.per_row, self.per_token = attention(config, setup.context)
        ends = {config.width, config.vocab_size}
        shared = getattr(config, "num_shared_experts", 0) > 0
        self.ends = Ends(ends) if shared else Ends(ends, ends)
        self.experts_per_token = getattr(config, "experts_per_token", 0) or 1
        self.one = self._one_token()

    @property
    def num_params(self) -> int:
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))

    def _one_token(self) -> Work:
        """The products of a pass of one token, but for its attention to the cache."""
        cache = jax.eval_shape(lambda: self.target.init_cache(1, 2, jnp.bfloat16))
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)

        def forward(params, cache, tokens):
            hidden = self.target(params, tokens, cache).hidden
            return self.target.logits(params, hidden)

        work = count(forward, self.ends, self.params, cache, token)
        return dataclasses.replace(work, cache=0.0, cache_flops=0.0)

    def check_memory(self, drafter_params: int = 0) -> None:
        """Refuses what the chips cannot hold: weights, and the cache of all rows."""
        s = self.setup
        weights = (self.num_params + drafter_params) * s.weight_bytes
        # Where the cache cannot be split any further every chip holds a copy.
        copies = s.chips / self._cache_chips(s.chips)
        cache = self.stored_per_row * s.batch * s.cache_bytes * copies
        if weights + cache > s.chips * s.chip.memory:
            raise ValueError(
                f"{weights / 1e9:.0f} GB of weights and {cache / 1e9:.0f} GB of cache "
                f"do not fit in {s.chips} x {s.chip.memory / 1e9:.0f} GB; give more "
                "--chips, or less --batch, --context, --weight-bytes or --cache-bytes."
            )

    @property
    def stored_per_row(self) -> int:
        """Numbers of a row's cache: layers that share one store it once."""
        cache = jax.eval_shape(lambda: self.target.init_cache(1, 1))
        slots = zip(cache.k, cache.v, strict=True)
        windows = [self.config.window(i) for i in range(len(cache.k))]
        return sum(
            (math.prod(k.shape) + math.prod(v.shape))
            * min(self.setup.context, w or 2**62)
            for (k, v), w in zip(slots, windows, strict=True)
        )

    def _cache_chips(self, chips: int) -> int:
        return min(chips, self.config.num_kv_heads)

    def _time(self, work: Work, tokens: int, passes: int) -> Part:
        s, P = self.setup, self.setup.chips
        bandwidth = s.chip.bandwidth * s.bandwidth_share
        peak = s.chip.flops * s.compute_share * P
        numbers = work.weights + work.touched(self.experts_per_token)
        reading = numbers * s.weight_bytes / (P * bandwidth)
        weights = max(reading, work.flops / peak)
        attending = work.cache * s.cache_bytes / (self._cache_chips(P) * bandwidth)
        moved = 2 * (P - 1) / P * tokens * self.config.width * 2
        each = s.collective + moved / (s.chip.link / 2)
        return Part(
            weights=weights,
            cache=max(attending, work.cache_flops / peak),
            collectives=work.reductions * each if P > 1 else 0.0,
            overhead=passes * s.overhead,
            bound="memory" if reading >= work.flops / peak else "compute",
        )

    def target_pass(self, tokens: int) -> Part:
        """A pass of the target over so many tokens, those of all rows."""
        work = self.one.times(tokens)
        work.cache = self.per_row * self.setup.batch
        work.cache_flops = self.per_token * tokens
        return self._time(work, tokens, 1)

    def curve(self, up_to: int) -> cost.Curve:
        """Seconds against tokens of a pass; as measured ones, at powers of two."""
        rows = self.setup.batch
        nodes = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < up_to] + [up_to]
        tokens = tuple(rows * n for n in nodes)
        seconds = tuple(self.target_pass(n).seconds for n in tokens)
        return cost.Curve(rows, tokens, seconds)

    def drafter(self, name: str, gamma: int, **fields: Any) -> Drafter:
        """A registered drafter of the paper's shape for this target."""
        mask = self.config.vocab_size - 1
        cls, own = drafters.get(name), fields.pop("config", None)
        drafter = cls.for_target(self.config, mask, gamma=gamma, **fields)
        return drafter if own is None else dataclasses.replace(drafter, config=own)

    def draft_params(self, drafter: Drafter) -> Any:
        init = lambda shared: drafter.init(jax.random.key(0), shared)
        return _shapes(jax.eval_shape(init, self.start))

    def draft(self, drafter: Drafter) -> Part:
        """A draft and its commit, all rows together."""
        B, N = self.setup.batch, drafter.tree.num_nodes
        work = self.draft_work(drafter)
        passes = drafter.gamma if drafter.card.passes == "gamma" else 1
        # Tokens of an all-reduce: those of a pass, one a row unless all go at once.
        tokens = B if passes > 1 else B * N
        return self._time(work, tokens, passes)

    def draft_work(self, drafter: Drafter) -> Work:
        B, N, T = self.setup.batch, drafter.tree.num_nodes, 8
        size = self.setup.context + N + 2
        params, shared = self.draft_params(drafter), self.shared
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        wide = max(len(drafter.taps), 0) * self.config.width
        features = lambda n: jax.ShapeDtypeStruct((B, n, wide), jnp.bfloat16)
        begin = functools.partial(drafter.prefill, cache_size=size)
        state = jax.eval_shape(begin, params, shared, ints(B, T), ints(B), features(T))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
        own = jax.eval_shape(lambda: self.target.init_cache(B, size, jnp.bfloat16))

        def draft(weights, caches, anchor, keys):
            (params, shared), (state, cache) = weights, caches
            shared = dataclasses.replace(shared, cache=cache)
            return drafter.draft(params, shared, state, anchor, GREEDY, keys)

        dense = {*self.ends.dense, len(getattr(drafter, "draft_ids", ()) or ())}
        for record in (drafter, getattr(drafter, "config", drafter)):
            dense.add(getattr(record, "width", self.config.width))
        ends = self.ends._replace(dense=dense)
        work = count(draft, ends, (params, shared), (state, own), ints(B), keys)
        after = jax.eval_shape(draft, (params, shared), (state, own), ints(B), keys)[1]

        def commit(weights, state, accepted, tokens, valid, features):
            verdict = Verdict(num_accepted=accepted, tokens=tokens, valid=valid)
            params, shared = weights
            return drafter.commit(params, shared, state, verdict, tokens, features)

        valid = jax.ShapeDtypeStruct((B,), jnp.bool_)
        done = ints(B), ints(B, N), valid, features(N)
        more = count(commit, ends, (params, shared), after, *done)
        return work + more


def model(name: str) -> TransformerConfig:
    """A known shape, or that of a folder's or hub id's config.json."""
    if name in MODELS:
        return MODELS[name]
    if name != "tiny" and "/" not in name and not pathlib.Path(name).exists():
        raise ValueError(
            f"unknown model {name!r}; known: {', '.join(MODELS)}, tiny; or give a "
            "folder with config.json or a hub id such as Qwen/Qwen3-8B."
        )
    return targets.read_config(name)


def judge(
    plan: Plan,
    spec: str,
    alphas: Sequence[float],
    max_gamma: int,
    draft_vocab: int | None = None,
    grid: Sequence[float] = (),
) -> dict[str, Any]:
    """What a drafter is worth on a plan, by gamma; `spec` is NAME or NAME:MODEL.

    The draft is traced at 1, 2, 4, .. tokens and its time is linear between; a drafter
    that refuses so many stops earlier. `grid` are more constant alphas to show.
    """
    name, fields = _fields(spec, plan.config, draft_vocab)
    seconds: dict[int, float] = {}
    chosen = [2**i for i in range(16) if 2**i < max_gamma] + [max_gamma]
    for gamma in chosen:
        try:
            drafter = plan.drafter(name, gamma, **fields)
        except ValueError:
            if not seconds:
                raise
            break
        seconds[gamma] = plan.draft(drafter).seconds
    num_params = sum(
        math.prod(x.shape) for x in jax.tree.leaves(plan.draft_params(drafter))
    )
    plan.check_memory(num_params)
    gammas = np.arange(1, max(seconds) + 1)
    t = plan.target_pass(plan.setup.batch).seconds
    c = np.interp(gammas, list(seconds), list(seconds.values())) / t
    rows = plan.setup.batch
    v = np.array([plan.target_pass(int(rows * (g + 1))).seconds for g in gammas]) / t
    at = lambda a: cost.speedups(cost.survival(a, len(gammas)), v, c)
    speeds = at(alphas)
    best, speed = cost.best_gamma(speeds)
    return {
        "drafter": spec,
        "passes": drafter.card.passes,
        "params": num_params,
        "gammas": gammas.tolist(),
        "tau": cost.taus(cost.survival(alphas, len(gammas))).tolist(),
        "c": c.tolist(),
        "v": v.tolist(),
        "speedup": speeds.tolist(),
        "best_gamma": best,
        "best_speedup": speed,
        "break_even": cost.break_even(v, c),
        "by_alpha": [
            {"alpha": a, "gamma": g, "speedup": s}
            for a in grid
            for g, s in [cost.best_gamma(at(a))]
        ],
    }


def _fields(spec: str, config: TransformerConfig, draft_vocab: int | None):
    """Registry name, and fields that make a drafter other than the paper's shape."""
    name, given, other = spec.partition(":")
    if given and not other:
        raise ValueError(f"{spec} names no model; write {name}:MODEL or {name} alone.")
    known = {f.name for f in dataclasses.fields(drafters.get(name))}
    fields: dict[str, Any] = {}
    if other:
        if name not in ("draft_model", "pard"):
            raise ValueError(
                f"{spec}: only draft_model and pard are models of their own; leave out "
                f":{other}."
            )
        fields["config"] = model(other)
    if draft_vocab is not None and "draft_ids" in known:
        if not 1 <= draft_vocab <= config.vocab_size:
            raise ValueError(
                f"a draft vocabulary has 1 to {config.vocab_size} ids here, got "
                f"{draft_vocab}."
            )
        fields["draft_ids"] = tuple(range(draft_vocab))
    return name, fields
