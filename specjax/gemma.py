"""Decoder layers of Gemma 3 and 4: two kinds of attention, norms on both sides.

Gemma Team 2025, arXiv:2503.19786; Gemma 4 as its released weights and `transformers`
5.24 define it. Most layers are local: they see the last W keys. Each kind has its own
rotary base and, in Gemma 4, its own head width and kv heads. For the stream x, every
norm an RMS norm with weights,

    a = RMS(x);  q = rope(RMS(Wq a)),  k = rope(RMS(Wk a)),  v = Wv a     [per head] (1)
    x = x + RMS(Wo softmax(s q k^T + mask) v)                                        (2)
    x = x + RMS(Wdown(gelu(Wgate m) * (Wup m))),  m = RMS(x)                         (3)

with s = `query_scale`. The stack reads sqrt(D) times the embedding. Gemma 4 further

    normalises v without weights, s = 1; with `keys_as_values` full layers have no Wv
        and v = RMS(Wk a)                                                            (4)
    lets the last `num_shared_layers` layers attend to the keys and values of the last
        layer of their kind that has its own                                         (5)
    adds to x, with P numbers p_i a token and layer, RMS(Wb(gelu(Wa x) * p_i)), and  (6)
        p = (RMS(Wc e / sqrt(D)) + sqrt(P) E'[token]) / sqrt(2),  e the embedding
    adds to (3), inside its outer norm, experts of the stream before it              (7)
    multiplies x by a number a layer, and caps the logits.

A norm multiplies in float32 and casts last, so its weights stay in float32. Gemma 3
stores weight - 1; here it is the weight.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import kv_cache
from specjax.kv_cache import KVCache
from specjax.layers import (
    GatedMLP,
    Rope,
    dense,
    gelu,
    mixture,
    of_layers,
    rotate,
)
from specjax.transformer import (
    Block,
    Output,
    Shared,
    Transformer,
    TransformerConfig,
    attend_block,
    locate,
    tables,
)
from specjax.typing import Array, Float, Int, Params

MayBeZero = Annotated[int, "may be 0"]


@dataclasses.dataclass(frozen=True)
class GemmaConfig(TransformerConfig):
    """A stack of these layers; `windows` says which are local, None being full.

    `num_kv_heads`, `head_width` and `rope` are those of the local layers.
    """

    full_kv_heads: int | None = None  # None: as the local layers
    full_head_width: int | None = None
    full_rope: Rope = Rope(theta=1e6)
    query_scale: float = 256**-0.5  # s of eq. 2
    value_norm: bool = False  # eq. 4
    keys_as_values: bool = False
    num_shared_layers: MayBeZero = 0  # eq. 5
    shared_mlp_width: int | None = None  # of these layers
    layer_scale: bool = False
    softcap: float | None = None  # logits stay within +- this
    per_layer_width: MayBeZero = 0  # P of eq. 6
    per_layer_vocab: MayBeZero = 0  # rows of E'
    num_experts: MayBeZero = 0  # eq. 7
    experts_per_token: MayBeZero = 0
    expert_width: MayBeZero = 0

    def __post_init__(self):
        super().__post_init__()
        for name in ("qk_norm", "qkv_bias", "out_bias", "mlp_bias"):
            if getattr(self, name):
                raise ValueError(f"a Gemma layer has no switch {name}.")
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"a Gemma stack needs a window (None: full) for each of its "
                f"{self.num_layers} layers, got {len(self.windows)}."
            )
        if self.num_heads % self.kind(True).num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of "
                f"full_kv_heads={self.full_kv_heads}."
            )
        if not 0 <= self.num_shared_layers <= self.num_layers:
            raise ValueError(
                f"num_shared_layers={self.num_shared_layers} must be 0 to num_layers="
                f"{self.num_layers}."
            )
        if self.num_owners:
            for i in range(self.num_layers):
                self.source(i)
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"{self.experts_per_token} experts a token of {self.num_experts}."
            )

    @property
    def num_owners(self) -> int:
        """Layers with keys and values of their own; they come first."""
        return self.num_layers - self.num_shared_layers

    def source(self, i: int) -> int:
        """The layer whose keys and values layer i attends to."""
        if i < self.num_owners:
            return i
        is_full = lambda j: self.windows[j] is None
        same = [j for j in range(self.num_owners) if is_full(j) == is_full(i)]
        if not same:
            raise ValueError(
                f"layer {i} shares keys and values, but none of the first "
                f"{self.num_owners} layers is of its kind; lower num_shared_layers."
            )
        return same[-1]

    def kind(self, is_full: bool) -> TransformerConfig:
        """Heads and angles of one kind of layers, as `transformer.locate` wants."""
        return TransformerConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=(is_full and self.full_kv_heads) or self.num_kv_heads,
            head_width=(is_full and self.full_head_width) or self.head_width,
            mlp_width=self.mlp_width,
            rope=self.full_rope if is_full else self.rope,
            norm_eps=self.norm_eps,
            max_positions=self.max_positions,
        )


class Norm(nn.Module):
    """x / rms(x) times the weight, all in float32, then x's dtype."""

    eps: float
    scaled: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        if self.scaled:
            weight = self.param("scale", nn.initializers.ones, (x.shape[-1],))
            y = y * jnp.broadcast_to(weight.astype(jnp.float32), y.shape)
        return y.astype(x.dtype)


class Attention(nn.Module):
    """Eq. 1, 2 without its norm, and 4. Without `owns` it reads `slots` as they are."""

    config: GemmaConfig
    is_full: bool
    window: int | None
    owns: bool
    implementation: str | None = None  # of `tree_attention`, where there is a cache

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], block: Block, slots: tuple[Array, Array] | None
    ) -> tuple[Array, tuple[Array, Array]]:
        c, kind = self.config, self.config.kind(self.is_full)
        D, K, E = x.shape[-1], kind.num_kv_heads, kind.head_width
        G, normal = c.num_heads // K, nn.initializers.normal(0.02)
        turn = lambda y: rotate(y.swapaxes(1, 2), block.cos, block.sin)

        q = dense(x, self.param("q", normal, (K, G, E, D)))
        q = Norm(c.norm_eps, name="q_norm")(q.reshape(*x.shape[:2], K * G, E))
        q = turn(q).swapaxes(1, 2)
        if self.owns:
            key = v = dense(x, self.param("k", normal, (K, E, D)))
            if not (c.keys_as_values and self.is_full):
                v = dense(x, self.param("v", normal, (K, E, D)))
            if c.value_norm:
                v = Norm(c.norm_eps, scaled=False)(v)
            k, v = turn(Norm(c.norm_eps, name="k_norm")(key)), v.swapaxes(1, 2)
            if slots is not None:
                assert block.start is not None
                k = kv_cache.write(slots[0], k, block.start)
                v = kv_cache.write(slots[1], v, block.start)
            slots = k, v
        assert slots is not None
        out = attend_block(
            q,
            *slots,
            block,
            window=self.window,
            scale=c.query_scale,
            implementation=self.implementation,
        )
        return dense(out, self.param("out", normal, (D, c.num_heads * E))), slots


class Experts(nn.Module):
    """Eq. 7 without its norms; the router reads the stream, the experts `m`."""

    config: GemmaConfig

    @nn.compact
    def __call__(self, x: Array, m: Array) -> Array:
        c, D, ones = self.config, x.shape[-1], nn.initializers.ones
        X, F, normal = c.num_experts, c.expert_width, nn.initializers.normal(0.02)
        rows = Norm(c.norm_eps, scaled=False)(x.reshape(-1, D)).astype(jnp.float32)
        scale = self.param("router_scale", ones, (D,)).astype(jnp.float32) * D**-0.5
        router = self.param("router", normal, (X, D)).astype(jnp.float32)
        probs = jax.nn.softmax(dense(rows * scale[None], router), axis=-1)
        weights, chosen = jax.lax.top_k(probs, c.experts_per_token)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        each = self.param("expert_scale", ones, (X,)).astype(jnp.float32)
        gate_up = self.param("gate_up", normal, (X, D, 2 * F))
        down = self.param("down", normal, (X, F, D))
        out = mixture(
            m.reshape(-1, D), chosen, weights * each[chosen], gate_up, down, gelu
        )
        return out.reshape(x.shape)


class Layer(nn.Module):
    """Eq. 2, 3, 6 and 7."""

    config: GemmaConfig
    is_full: bool
    window: int | None  # of a local layer; None of a full one
    owns: bool = True  # keys and values; eq. 5
    implementation: str | None = None

    @nn.compact
    def __call__(self, x, block: Block, slots, per_layer=None):
        c, normal = self.config, nn.initializers.normal(0.02)
        norm = lambda name: Norm(c.norm_eps, name=name)
        kind = self.is_full, self.window, self.owns, self.implementation
        attention = Attention(c, *kind, name="attention")
        a, slots = attention(norm("input_norm")(x), block, slots)
        x = x + norm("post_attention_norm")(a)

        width = c.mlp_width if self.owns else c.shared_mlp_width or c.mlp_width
        mlp = GatedMLP(width, activation=gelu, name="mlp")
        m = mlp(norm("pre_mlp_norm")(x))
        if c.num_experts:
            more = Experts(c, name="experts")(x, norm("pre_experts_norm")(x))
            m = norm("dense_norm")(m) + norm("experts_norm")(more)
        x = x + norm("post_mlp_norm")(m)

        if per_layer is not None:
            (D,), P = x.shape[-1:], c.per_layer_width
            gate = gelu(dense(x, self.param("per_layer_gate", normal, (P, D))))
            proj = self.param("per_layer_proj", normal, (D, P))
            x = x + norm("per_layer_norm")(dense(gate * per_layer, proj))
        if c.layer_scale:
            scale = self.param("layer_scale", nn.initializers.ones, (1,))
            x = x * scale.astype(x.dtype)[None, None]
        return x, slots


class Stack(Transformer):
    """The stack with its embedding; see `transformer.Transformer`."""

    config: GemmaConfig

    def setup(self):
        super().setup()
        c, normal = self.config, nn.initializers.normal(0.02)
        if c.per_layer_width:
            LP = c.num_layers * c.per_layer_width
            shape = (c.per_layer_vocab, LP)
            self.embed_per_layer = self.param("embed_per_layer", normal, shape)
            self.per_layer_proj = self.param("per_layer_proj", normal, (LP, c.width))
            self.per_layer_norm = Norm(c.norm_eps)

    def make_layer(self, i: int) -> nn.Module:
        window, c = self.config.windows[i], self.config
        owns = i < c.num_owners
        return of_layers(Layer)(c, window is None, window, owns, self.attention)

    def make_norm(self) -> nn.Module:
        return Norm(self.config.norm_eps)

    def per_layer(self, tokens: Array, x: Array) -> Array:
        """p of eq. 6, [B T L P]."""
        c, (L, P) = self.config, (self.config.num_layers, self.config.per_layer_width)
        split = lambda y: y.reshape(*y.shape[:2], L, P)
        # A plain number multiplies unrounded, a scale of a table in the table's dtype.
        times = lambda y, by: (y.astype(jnp.float32) * by).astype(y.dtype)
        context = times(dense(x, self.per_layer_proj), c.width**-0.5)
        own = self.embed_per_layer[tokens]
        own = split(own * jnp.asarray(P**0.5, own.dtype))
        return times(self.per_layer_norm(split(context)) + own, 2**-0.5)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache | None = None,
        *,
        ancestors: Any = None,
        depths: Any = None,
        behind: Any = 0,
        taps: Sequence[int] = (),
    ) -> Output:
        c, shape = self.config, tokens.shape
        blocks = {
            kind: locate(c.kind(kind), shape, cache, ancestors, depths, behind)
            for kind in {w is None for w in c.windows}
        }
        x = Shared(self.embed, self.embed, embed_scale=c.width**0.5).embedding(tokens)
        inputs = self.per_layer(tokens, x) if c.per_layer_width else None
        states, kept = [x], []
        for i, layer in enumerate(self.layer):
            if i < c.num_owners:
                slots = None if cache is None else (cache.k[i], cache.v[i])
            else:
                slots = kept[c.source(i)]
            own = None if inputs is None else inputs[:, :, i]
            x, slots = layer(x, blocks[c.windows[i] is None], slots, own)
            states.append(x)
            kept.append(slots)

        states[-1] = hidden = self.norm(x)
        if cache is not None:
            k, v = zip(*kept[: c.num_owners], strict=True)
            cache = KVCache(k=k, v=v, length=cache.length)
        features = jnp.concatenate([states[t] for t in taps] or [x[..., :0]], axis=-1)
        return Output(hidden, features, cache)


def shared(config: GemmaConfig, params: Params) -> Shared:
    """Embedding and head with the scale of the one and the cap of the other."""
    found = tables(config, params)
    scale = config.width**0.5
    return dataclasses.replace(found, embed_scale=scale, softcap=config.softcap)


def init_cache(
    config: GemmaConfig, batch_size: int, size: int, dtype: Any = jnp.float32
) -> KVCache:
    """An empty cache: the layers with keys of their own, each in its kind's shape."""
    kinds = [config.kind(w is None) for w in config.windows[: config.num_owners]]
    shapes = [(batch_size, k.num_kv_heads, size, k.head_width) for k in kinds]
    make = lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes)
    return KVCache(make(), make(), jnp.zeros((batch_size,), jnp.int32))
