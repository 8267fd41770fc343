"""Hydra and Hydra++: one head a position, each reading the tokens drafted before it.

Ankner et al. 2024, arXiv:2402.05109; reference code zankner/Hydra. Head k = 1..G reads
f_t, the state from which the target's own head predicts the anchor x_{t+1}, with the
target's embeddings e(.) of the anchor and of the k - 1 tokens drafted after it:

    u = [f_t, e(x_{t+1}), ..., e(x_{t+k})]                  k + 1 vectors wide     (1)
    z = R_k u + r_k + SiLU(W_k u + b_k)                                            (2)
    z = z + SiLU(W'_k z + b'_k)            num_layers - 1 times, all the same W'_k (3)
    q_k = softmax(U_k z + c_k)             the law of x_{t+1+k}                    (4)

Hydra++ (`prefix`) has four layers a head and puts in the place of f_t what one decoder
layer, with norms and a cache of its own, makes of the states of the text so far:

    g_0 .. g_t = RMS(layer(f_0 .. f_t))                                            (5)

With p the target's law, S the smooth L1 distance and dropout before every product,

    loss = sum_k w_lm CE(q_k, x_{t+1+k}) + w_teacher CE(q_k, p_{t+k})
           + w_rec S(z_k, f_{t+k})                                                 (6)

where p_{t+k} is the target's law of the same token x_{t+1+k}: Hydra has w_lm = 1 alone,
Hydra++ w_teacher = 1 alone. W_k and W'_k start at zero, U_k as the target's head, all
else as a torch linear layer does, R_k too: a head does not start as the target's.

Follows the code that the public weights were trained with, also in what reads like an
accident: later layers of a head are one (W'), R and U have biases, eq. 5 ends in a
norm. Departs from code and paper: anchor and children are drawn, where theirs are the
likeliest at any temperature, in a tree of 63 nodes; and verification is exact, where
their typical acceptance is not (that is the rule `lossy_typical`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import draft_tree, kv_cache
from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.kv_cache import KVCache
from specjax.layers import RMSNorm, dense, of_layers
from specjax.pytree import pytree
from specjax.transformer import Layer, Shared, TransformerConfig, locate
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Bool, Float, Int, Params, PRNGKey

Drop = Callable[[Array, int], Array]  # dropout of what product number i reads
keep: Drop = lambda x, i: x


@pytree
class State:
    feature: Float[Array, "B D"]  # f_t or g_t, t the position before the anchor's
    cache: KVCache | None  # of eq. 5's layer: verified states alone ever enter it


def uniform(fan_in: int):
    """What a torch linear layer starts from."""
    end = fan_in**-0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-end, maxval=end)


def affine(x: Float[Array, "*B X"], weights: tuple[Array, Array], dtype: Any = None):
    """w x + b."""
    w, b = weights
    y = dense(x, w, dtype)
    return y + jnp.broadcast_to(b.astype(y.dtype), y.shape)


class Head(nn.Module):
    """Eq. 2 to 4 before the softmax: z, and the logits in float32, or with `scored`
    False what they are made of."""

    num_layers: int

    @nn.compact
    def __call__(
        self,
        u: Float[Array, "*B X"],
        head: Float[Array, "V D"],
        drop: Drop = keep,
        scored: bool = True,
    ) -> tuple[Float[Array, "*B D"], Float[Array, "*B _V"]]:
        L, (V, D), X = self.num_layers, head.shape, u.shape[-1]
        zeros, copied = nn.initializers.zeros, lambda key, shape: jnp.array(head)
        # R and W read the same u: one matrix, R first.
        first = lambda key, shape: uniform(X)(key, shape).at[1].set(0.0)

        def weights(name, start, *shape):
            bias = self.param(f"{name}_bias", uniform(shape[-1]), shape[:-1])
            return self.param(name, start, shape), bias

        y = affine(drop(u, 0), weights("first", first, 2, D, X))
        z = y[..., 0, :] + jax.nn.silu(y[..., 1, :])
        if L > 1:
            rest = weights("rest", zeros, D, D)
            for i in range(1, L):
                z = drop(z, i)
                z = z + jax.nn.silu(affine(z, rest))
        vocab, last = weights("vocab", copied, V, D), drop(z, L)
        return z, affine(last, vocab, jnp.float32) if scored else last


class Prefix(nn.Module):
    """Eq. 5 over states that follow those in the cache, if there is one."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, f: Float[Array, "B T D"], cache: KVCache | None):
        block = locate(self.config, f.shape[:2], cache, None, None)
        slots = None if cache is None else (cache.k[0], cache.v[0])
        x, (k, v) = of_layers(Layer)(self.config, name="layer")(f, block, slots)
        if cache is not None:
            cache = KVCache((k,), (v,), cache.length)
        return RMSNorm(self.config.norm_eps, name="norm")(x), cache


@dataclasses.dataclass(frozen=True)
class Hydra:
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="last feature, drafted tokens",
        passes="gamma",
        trained="heads",
        paper="Ankner et al., arXiv:2402.05109",
        year=2024,
    )

    gamma: int = 4  # drafted tokens per round, at most num_heads
    num_heads: int = 4
    num_layers: int = 1  # blocks of a head; all but the first are one
    prefix: TransformerConfig | None = None  # eq. 5's layer; None: heads read f_t
    w_lm: float = 1.0
    w_teacher: float = 0.0
    w_rec: float = 0.0
    dropout: float = 0.0  # in training only
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        name = type(self).__name__
        for field in ("gamma", "num_layers"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{name} needs {field} >= 1, got {getattr(self, field)}."
                )
        if max(self.gamma, self.tree.depth) > self.num_heads:
            raise ValueError(
                f"{name} has one head a depth: gamma={self.gamma} and a tree of depth "
                f"{self.tree.depth} do not fit num_heads={self.num_heads}. Draft less "
                "or train more heads."
            )
        weights = (self.w_lm, self.w_teacher, self.w_rec)
        if min(weights) < 0 or sum(weights) == 0:
            raise ValueError(
                f"{name} needs w_lm, w_teacher, w_rec >= 0 and one above, got "
                f"{weights}."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{name} needs 0 <= dropout < 1, got {self.dropout}.")
        if self.prefix is not None and self.prefix.num_layers != 1:
            raise ValueError(
                f"{name} has a prefix of one layer, got num_layers="
                f"{self.prefix.num_layers}."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """As many heads as tokens are drafted, unless `num_heads` says otherwise."""
        del config, mask_token_id
        if "gamma" in fields:
            fields = {"num_heads": fields["gamma"]} | fields
        return cls(**fields)

    @property
    def tree(self) -> Tree | DynamicTree:
        return self.topology or Tree.chain(self.gamma)

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,)

    @property
    def max_positions(self) -> int | None:
        return self.prefix.max_positions if self.prefix else None

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        D = shared.head.shape[1]
        keys = jax.random.split(key, self.num_heads + 1)
        params = {}
        for k in range(1, self.num_heads + 1):
            u = jnp.zeros((1, (k + 1) * D), shared.head.dtype)
            net = Head(self.num_layers)
            params[f"head_{k}"] = net.init(keys[k], u, shared.head)["params"]
        if self.prefix is not None:
            f = jnp.zeros((1, 1, D), shared.head.dtype)
            params["prefix"] = Prefix(self.prefix).init(keys[0], f, None)["params"]
        return params

    def head(
        self,
        params: Params,
        shared: Shared,
        k: int,
        read: Float[Array, "*B X D"],
        drop: Drop = keep,
        scored: bool = True,
    ) -> Any:
        """z and logits of head k, which reads the first k + 1 vectors (eq. 1)."""
        u = read[..., : k + 1, :].reshape(*read.shape[:-2], -1)
        net, own = Head(self.num_layers), {"params": params[f"head_{k}"]}
        return net.apply(own, u, shared.head, drop, scored)

    def context(
        self, params: Params, f: Float[Array, "B T D"], cache: KVCache | None = None
    ) -> Any:
        """What heads read in the place of f_t, and the cache with it written."""
        if self.prefix is None:
            return f, None
        return Prefix(self.prefix).apply({"params": params["prefix"]}, f, cache)

    def _read(self, params, cache: KVCache | None, features, num) -> State:
        """The state after the first `num` of the tokens that follow the cache."""
        g, cache = self.context(params, features, cache)
        if cache is not None:
            cache = kv_cache.commit(cache, None, num)
        return State(feature=g[jnp.arange(g.shape[0]), num - 1], cache=cache)

    def prefill(self, params, shared, tokens, lengths, features, cache_size) -> State:
        del shared
        cache, c = None, self.prefix
        if c is not None:
            B, dtype = tokens.shape[0], features.dtype
            cache = kv_cache.init(1, B, c.num_kv_heads, cache_size, c.head_width, dtype)
        return self._read(params, cache, features, lengths)

    def draft(self, params, shared, state: State, anchor, sampling, keys):
        tree, B = self.tree, anchor.shape[0]
        known = jnp.stack([state.feature, shared.embedding(anchor)], axis=1)  # [B 2 D]
        _, logits = self.head(params, shared, 1, known)
        # The heads have weights of their own shapes: a level chooses its head.
        heads = [
            lambda read, k=k: self.head(params, shared, k, read)[1]
            for k in range(2, tree.depth + 1)
        ]

        def step(held, tokens, sees, level):
            W = tokens.shape[1]
            held = jax.lax.dynamic_update_slice(held, tokens, (0, level * W))
            above = jnp.broadcast_to(known[:, None], (B, W, *known.shape[1:]))
            path = shared.embedding(path_tokens(held, sees))
            read = jnp.concatenate([above, path], axis=2)
            return jax.lax.switch(level, heads, read), held

        held = jnp.zeros((B, draft_tree.num_slots(tree)), jnp.int32)
        draft, _ = draft_tree.grow(tree, logits, step, held, sampling, keys)
        return draft, state

    def commit(self, params, shared, state: State, verdict, tokens, features) -> State:
        del shared, tokens
        return self._read(params, state.cache, features, verdict.num_committed)

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 6, each term of a head averaged over the positions it is known at."""
        tokens, depth = batch.tokens, self.tree.depth
        g, _ = self.context(params, batch.features)
        coming = [base.shift(tokens, k) for k in range(1, self.num_heads + 1)]
        read = jnp.stack([g, *(shared.embedding(x) for x in coming)], axis=2)
        thin = lambda x: x[:, :: base.THIN]
        zs, lasts, laws = [], [], []
        for k in range(1, self.num_heads + 1):
            drop = self._dropout(jax.random.fold_in(key, k), tokens.shape)
            z, last = self.head(params, shared, k, read, drop, scored=False)
            zs.append(z)
            lasts.append(last)
            if k <= depth:  # as heads draft, without dropout
                laws.append(self.head(params, shared, k, thin(read))[1])
        logs = self._terms(params, shared, zs, lasts, batch)
        total = sum(jnp.sum(getattr(self, f"w_{name}") * x) for name, x in logs.items())
        return total, logs | base.step_acceptance(laws, shared, batch)

    def _terms(self, params, shared: Shared, zs: list, lasts: list, batch: Batch):
        """The means of eq. 6 at each head [K] whose weights are not zero."""
        own = [params[f"head_{k}"] for k in range(1, len(zs) + 1)]

        def values(lasts, hidden, label):
            found = {"lm": [], "teacher": []}
            p = jax.nn.softmax(shared.logits(hidden)) if self.w_teacher else None
            for x, w in zip(lasts, own, strict=True):
                q = affine(x, (w["vocab"], w["vocab_bias"]), jnp.float32)
                if self.w_lm:
                    found["lm"].append(base.cross_entropy(q, label))
                if p is not None:
                    found["teacher"].append(base.soft_cross_entropy(q, p))
            return found

        scores, label = len(own) * shared.embed.shape[0], base.shift(batch.tokens, 1)
        args = base.late(lasts), batch.hidden, label
        found = base.few_places(values, scores, *args)
        wanted = base.shift(batch.mask, 1)
        means = {k: base.late_means(x, wanted) for k, x in found.items() if x}
        if self.w_rec:
            distances = [base.smooth_l1(z, batch.hidden) for z in base.late(zs)]
            means["rec"] = base.late_means(distances, batch.mask)
        return means

    def _dropout(self, key: PRNGKey, shape: tuple[int, ...]) -> Drop:
        """Dropout whose draws depend on a position's row and place alone."""
        if not self.dropout:
            return keep
        keys = base.place_keys(key, shape)
        most = round((1 - self.dropout) * 2**16)  # of the 16-bit draws that keep

        def drop(x: Float[Array, "B T D"], i: int):
            draw = lambda k: jax.random.bits(
                jax.random.fold_in(k, i), x.shape[2:], jnp.uint16
            )
            kept = jax.vmap(jax.vmap(draw))(keys).astype(jnp.int32) < most
            return jnp.where(kept, x / (1 - self.dropout), jnp.zeros_like(x))

        return drop


def path_tokens(
    held: Int[Array, "B M"], sees: Bool[Array, "B W M"]
) -> Int[Array, "B W L"]:
    """Tokens from depth 1 on of the paths that lead to a level's W nodes.

    Of each level that was drafted a node sees one slot; later ones give 0.
    """
    B, W, M = sees.shape
    chosen = jnp.where(sees, held[:, None], 0).reshape(B, W, M // W, W)
    return jnp.sum(chosen, axis=3)


@dataclasses.dataclass(frozen=True)
class HydraPlus(Hydra):
    """Hydra++: the same drafter with the settings of the released one."""

    card: ClassVar[Card] = dataclasses.replace(
        Hydra.card,
        reads="states of the text, drafted tokens",
        trained="heads, prefix layer",
    )

    num_layers: int = 4
    w_lm: float = 0.0
    w_teacher: float = 1.0
    dropout: float = 0.2

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """The prefix is a plain layer of the target's shape."""
        prefix = dataclasses.replace(config.plain_layer(), qkv_bias=False)
        return super().for_target(config, mask_token_id, **{"prefix": prefix} | fields)
