"""DeepSeek-V3's decoder layer: attention over a latent, and a mixture of experts.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.1; numerics of `transformers` 5.24. For
one token with a = RMS(x), per head and with norms of their own,

    [qn; qr] = U_q RMS(D_q a)                                                        (1)
    [c; kr] = D_kv a;  c = RMS(c)                 one c and one kr for all heads     (2)
    [kn; v] = U_kv c                                                                 (3)
    scores = (qn . kn + rope(qr) . rope(kr)) s,   s = (En + Er)^-1/2 g^2             (4)

with g = 1 + 0.1 m ln f under YaRN. A cache holds c and rope(kr) alone: R + Er numbers a
token in place of H (En + Er + Ev), 71 times fewer at DeepSeek-V3's shape. As
U_kv = [U_k; U_v] is linear, nothing is ever expanded over the cached tokens:

    qn . kn = (U_k^T qn) . c,    sum_t w_t v_t = U_v (sum_t w_t c_t)                 (5)

which is attention with one key head of R + Er numbers, its values the first R. A prompt
takes more products this way, but a round is bound by reading the cache.

Experts: s_i = sigmoid(w_i . m) in float32; s_i + b_i chooses, first the groups with the
largest sum of their two best, then the experts in them; s_i weighs:

    y = shared(m) + scale sum_{i chosen} s_i / (sum_j chosen s_j) expert_i(m)        (6)

The rotary pairs lie half-split here; a file's interleaved rows are reordered when it is
read. b_i is no subject of gradients: DeepSeek moves it by load, which is not done here.
"""

import dataclasses
import math
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import kv_cache, transformer
from specjax.kv_cache import KVCache
from specjax.layers import (
    GatedMLP,
    RMSNorm,
    Rope,
    Sees,
    attend,
    attend_long,
    dense,
    group_queries,
    mixture,
    of_layers,
    rotate,
)
from specjax.transformer import Transformer, TransformerConfig
from specjax.typing import Array, Float, Int

LORA_EPS = 1e-6  # of the norms in eq. 1 and 2, whatever the others have


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig(TransformerConfig):
    """A stack of latent attention; `num_kv_heads` is 1, `head_width` the rotary part.

    Defaults are those of DeepSeek-V3; `mlp_width` is that of its dense layers.
    """

    q_rank: int | None = 1536  # None: one matrix in place of D_q and U_q
    kv_rank: int = 512  # R
    nope_width: int = 128  # En, the part of q and k that is not rotated
    value_width: int = 128  # Ev
    num_dense_layers: Annotated[int, "may be 0"] = 3  # before the first with experts
    num_experts: int = 256
    experts_per_token: int = 8
    expert_width: int = 2048
    num_shared_experts: int = 1
    num_groups: int = 8
    groups_per_token: int = 4
    routed_scale: float = 2.5
    normalise_experts: bool = True  # divide by the sum in eq. 6
    mscale_all_dim: float = 0.0  # m of g; 0: no g

    def __post_init__(self):
        super().__post_init__()
        for name in ("qk_norm", "qkv_bias", "out_bias", "mlp_bias", "windows"):
            if getattr(self, name):
                raise ValueError(f"a layer of latent attention has no {name}.")
        if self.num_kv_heads != 1:
            raise ValueError(
                f"all heads share one latent: num_kv_heads is 1, not "
                f"{self.num_kv_heads}."
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_experts={self.num_experts} is no multiple of "
                f"num_groups={self.num_groups}."
            )
        held = self.groups_per_token * self.num_experts // self.num_groups
        if self.groups_per_token > self.num_groups or self.experts_per_token > held:
            raise ValueError(
                f"{self.experts_per_token} experts a token do not fit in "
                f"groups_per_token={self.groups_per_token} of {self.num_groups} groups "
                f"of {self.num_experts} experts."
            )

    def plain_layer(self) -> TransformerConfig:
        """With keys and values for each head, and positions that are not scaled."""
        return dataclasses.replace(
            super().plain_layer(),
            num_kv_heads=self.num_heads,
            head_width=self.value_width,
            rope=Rope(theta=self.rope.theta),
        )

    @property
    def score_scale(self) -> float:
        """s of eq. 4."""
        scale = (self.nope_width + self.head_width) ** -0.5
        if self.rope.factor <= 1 or not self.mscale_all_dim:
            return scale
        g = 0.1 * self.mscale_all_dim * math.log(self.rope.factor) + 1.0
        return scale * g * g


class LatentAttention(nn.Module):
    """Eq. 1, 2, 4 and 5; the interface of `transformer.Attention`."""

    config: DeepSeekConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], block, slots):
        c = self.config
        (B, T, D), H, R, En = x.shape, c.num_heads, c.kv_rank, c.nope_width
        normal = nn.initializers.normal(0.02)
        Eq, Ev = En + c.head_width, c.value_width
        if c.q_rank is None:
            q = dense(x, self.param("q", normal, (H, Eq, D)))
        else:
            q = dense(x, self.param("q_down", normal, (c.q_rank, D)))
            q = RMSNorm(LORA_EPS, name="q_norm")(q)
            q = dense(q, self.param("q_up", normal, (H, Eq, c.q_rank)))
        turn = lambda y: rotate(y.swapaxes(1, 2), block.cos, block.sin).swapaxes(1, 2)
        kv = dense(x, self.param("kv_down", normal, (R + c.head_width, D)))[:, :, None]
        latent = RMSNorm(LORA_EPS, name="kv_norm")(kv[..., :R])
        k = jnp.concatenate([latent, turn(kv[..., R:])], axis=-1).swapaxes(1, 2)
        if slots is not None:
            k = kv_cache.write(slots[0], k, block.start)

        up = self.param("kv_up", normal, (H, En + Ev, R))
        f32 = {"preferred_element_type": jnp.float32}
        inner = jnp.einsum("BTHE,HER->BTHR", q[..., :En], up[:, :En], **f32)
        q = jnp.concatenate([inner.astype(q.dtype), turn(q[..., En:])], axis=-1)
        q = q * (c.score_scale * k.shape[-1] ** 0.5)  # `attend` divides by the root
        if isinstance(block.mask, Sees):
            places = block.query_positions, block.key_positions
            out = attend_long(q, k, k, block.mask, places).reshape(q.shape)
            out = group_queries(out, 1)
        else:
            out = attend(group_queries(q, 1), k, k, block.mask)  # [B 1 HT R+Er]
        out = out.reshape(B, H, T, -1)[..., :R]
        out = jnp.einsum("BHTR,HER->BTHE", out, up[:, En:], **f32).astype(x.dtype)
        out = dense(out.reshape(B, T, H * Ev), self.param("out", normal, (D, H * Ev)))
        # The values lie within the keys: their own slots have no width.
        return out, (k, k[..., :0])


def route(
    config: DeepSeekConfig, scores: Float[Array, "R X"], bias: Float[Array, "X"]
) -> tuple[Int[Array, "R Y"], Float[Array, "R Y"]]:
    """The experts of each row by their biased scores, and their weights in eq. 6."""
    c, (R, X) = config, scores.shape
    biased = scores + bias[None]
    groups = biased.reshape(R, c.num_groups, -1)
    best, _ = jax.lax.top_k(groups, min(2, groups.shape[2]))
    _, kept = jax.lax.top_k(jnp.sum(best, axis=2), c.groups_per_token)
    open_ = jnp.any(kept[..., None] == jnp.arange(c.num_groups)[None, None], axis=1)
    biased = jnp.where(open_[..., None], groups, -jnp.inf).reshape(R, X)
    _, chosen = jax.lax.top_k(biased, c.experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if c.normalise_experts:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return chosen, weights * c.routed_scale


class Experts(nn.Module):
    """Eq. 6."""

    config: DeepSeekConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c, D, X = self.config, x.shape[-1], self.config.num_experts
        normal, F = nn.initializers.normal(0.02), c.expert_width
        rows = x.reshape(-1, D)
        router = self.param("router", normal, (X, D)).astype(jnp.float32)
        bias = self.param("router_bias", nn.initializers.zeros, (X,))
        scores = jax.nn.sigmoid(dense(rows.astype(jnp.float32), router))
        chosen, weights = route(c, scores, bias.astype(jnp.float32))

        gate_up = self.param("gate_up", normal, (X, D, 2 * F))
        down = self.param("down", normal, (X, F, D))
        out = mixture(rows, chosen, weights, gate_up, down)
        shared = GatedMLP(F * c.num_shared_experts, name="shared")(x)
        return out.reshape(x.shape) + shared


class Layer(nn.Module):
    """Latent attention and a dense MLP or experts; as `transformer.Layer`."""

    config: DeepSeekConfig
    has_experts: bool = True

    @nn.compact
    def __call__(self, x, block, slots):
        c = self.config
        a = RMSNorm(c.norm_eps, name="input_norm")(x)
        a, slots = LatentAttention(c, name="attention")(a, block, slots)
        x = x + a
        m = RMSNorm(c.norm_eps, name="post_norm")(x)
        if self.has_experts:
            return x + Experts(c, name="mlp")(m), slots
        return x + GatedMLP(c.mlp_width, name="mlp")(m), slots


def layer_of(config: DeepSeekConfig, i: int) -> nn.Module:
    """Layer i of a stack."""
    return of_layers(Layer)(config, i >= config.num_dense_layers)


class Stack(Transformer):
    """The stack with its embedding and head; see `transformer.Transformer`."""

    config: DeepSeekConfig

    def make_layer(self, i: int) -> nn.Module:
        return layer_of(self.config, i)


def last_layer(config: TransformerConfig, **options: Any) -> nn.Module:
    """A layer as the last ones of a stack of this config are."""
    if isinstance(config, DeepSeekConfig):
        return of_layers(Layer)(config, **options)
    return of_layers(transformer.Layer)(config, **options)


def init_cache(
    config: TransformerConfig,
    num_layers: int,
    batch_size: int,
    size: int,
    dtype: Any = jnp.float32,
) -> KVCache:
    """An empty cache for layers of this config."""
    c = config
    if not isinstance(c, DeepSeekConfig):
        return kv_cache.init(
            num_layers, batch_size, c.num_kv_heads, size, c.head_width, dtype
        )
    width = c.kv_rank + c.head_width
    cache = kv_cache.init(num_layers, batch_size, 1, size, width, dtype)
    return dataclasses.replace(cache, v=tuple(v[..., :0] for v in cache.v))
