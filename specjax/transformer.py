"""A decoder stack of the Llama form, used by targets and by drafters alike.

One layer, for the residual stream x (Touvron et al. 2023, arXiv:2302.13971; Qwen3 adds
the per-head norms of q and k, arXiv:2505.09388):

    a = RMS(x);  q, k, v = a Wq + bq, a Wk + bk, a Wv + bv;  [q, k = RMS(q), RMS(k)]
    x = x + softmax(rope(q) rope(k)^T E^-1/2 + mask) v Wo
    x = x + down(silu(gate RMS(x)) * up RMS(x))

and logits = RMS(x) Whead. A pass reads a whole prompt, a chain or a tree of tokens: the
visibility among its own tokens is an argument, everything in the cache is visible.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax import kv_cache, sharding
from specjax.kernels.tree_attention import choose, tree_attention
from specjax.kv_cache import KVCache
from specjax.layers import (
    GatedMLP,
    RMSNorm,
    Rope,
    Sees,
    attend,
    attend_long,
    dense,
    earlier,
    group_queries,
    is_long,
    of_layers,
    rotary,
    rotate,
    ungroup_queries,
)
from specjax.pytree import pytree, static
from specjax.typing import Array, Bool, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shapes and switches of a stack; defaults are those of a plain Llama."""

    vocab_size: int
    width: int  # D
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_width: int  # E
    mlp_width: int  # F
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    qk_norm: bool = False  # RMS norm per head on q and k, before rotary
    qkv_bias: bool = False
    out_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    tie_embeddings: bool = False  # the head is the embedding table
    max_positions: int = 2048  # tokens
    windows: tuple[int | None, ...] = ()  # keys a layer sees, itself included; () = all

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"a transformer needs {field.name} >= 1, got {value}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        if self.head_width % 2:
            raise ValueError(f"rotary needs an even head_width, got {self.head_width}.")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers."
            )

    def plain_layer(self) -> "TransformerConfig":
        """One Llama layer of this shape, for a drafter; biases of q, k and v stay."""
        names = [f.name for f in dataclasses.fields(TransformerConfig)]
        values = {name: getattr(self, name) for name in names}
        values |= {"num_layers": 1, "tie_embeddings": True, "windows": ()}
        values |= dict.fromkeys(("qk_norm", "out_bias", "mlp_bias"), False)
        return TransformerConfig(**values)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


class Output(NamedTuple):
    """What a pass returns."""

    hidden: Float[Array, "B T D"]  # after the final norm: what the head reads
    features: Float[Array, "B T MD"]  # the tapped states, side by side
    cache: Any  # the KVCache given, entries written but not yet committed; or None


class Block(NamedTuple):
    """Where the tokens of a pass stand, computed once and shared by all layers."""

    cos: Float[Array, "B T E"]
    sin: Float[Array, "B T E"]
    query_positions: Int[Array, "B T"]
    key_positions: Int[Array, "B S"]
    # Repeated for the query heads of a kv head; of long texts how to make it.
    mask: Bool[Array, "#B Q S"] | Sees
    start: Int[Array, "B"] | None  # slot of the first token; None = no cache
    # What the mask was made of, for a kernel that makes its own: committed slots, and
    # ancestors [B T M] and depths [B M] of the uncommitted ones.
    nodes: tuple[Array, Array, Array] | None = None


class Unrolled(NamedTuple):
    """Keys and values of a text, and those that its rows added in passes since.

    A pass over an `unrolled` block sees the text up to its row, and what the same row
    added; not what other rows did. As many drafts as rows go on side by side.
    """

    k: Float[Array, "B K S E"]
    v: Float[Array, "B K S E"]
    added: tuple[tuple[Array, Array], ...] = ()  # k and v [B K T E] of each pass


def attend_block(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    block: Block,
    *,
    window: int | None = None,
    scale: float | None = None,
    own: tuple[tuple[Array, Array], ...] = (),
    implementation: str | None = None,
) -> Float[Array, "B T HE"]:
    """What the tokens of a pass read of one layer's keys and values, heads joined.

    Where the block says of which `nodes` its mask is, `implementation` is one of
    `tree_attention`'s. `window`, `scale` and `own` are as `attend` has them.
    """
    T, G = q.shape[1], q.shape[2] // k.shape[1]
    if block.nodes is not None and choose(implementation, q, k, v) != "reference":
        out = tree_attention(
            q,
            k,
            v,
            *block.nodes,
            block.query_positions,
            window=window,
            scale=scale,
            implementation=implementation,
        )
        return out.reshape(*out.shape[:2], -1)
    if isinstance(block.mask, Sees):
        places = block.query_positions, block.key_positions
        return attend_long(q, k, v, block.mask, places, window, scale)
    mask = block.mask
    if window is not None:
        distance = block.query_positions[..., None] - block.key_positions[:, None]
        mask = mask & jnp.tile(distance < window, (1, G, 1))
    out = attend(group_queries(q, k.shape[1]), k, v, mask, own, scale)
    return ungroup_queries(out, T)


class Attention(nn.Module):
    """Grouped-query attention of one layer over the cache and the pass's own tokens.

    The input may be wider or narrower than the stack, whose width the output has.
    """

    config: TransformerConfig
    window: int | None = None
    implementation: str | None = None  # of `tree_attention`, where there is a cache

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        block: Block,
        slots: tuple[Array, Array] | Unrolled | None,
    ) -> tuple[Array, Any]:
        c = self.config
        D, K, E = x.shape[-1], c.num_kv_heads, c.head_width
        G = c.num_heads // K
        normal, zeros = nn.initializers.normal(0.02), nn.initializers.zeros

        # The G query heads of a kv head lie beside its k and v: one product, and the
        # whole matrix is split over K by a tensor-parallel mesh.
        qkv = dense(x, self.param("qkv", normal, (K, G + 2, E, D)))
        if c.qkv_bias:
            qkv = qkv + self.param("qkv_bias", zeros, (K, G + 2, E))[None, None]
        q, k, v = qkv[..., :G, :], qkv[..., G, :], qkv[..., G + 1, :]
        q = q.reshape(*q.shape[:2], K * G, E)
        if c.qk_norm:
            q = RMSNorm(c.norm_eps, name="q_norm")(q)
            k = RMSNorm(c.norm_eps, name="k_norm")(k)
        q = rotate(q.swapaxes(1, 2), block.cos, block.sin).swapaxes(1, 2)
        k = rotate(k.swapaxes(1, 2), block.cos, block.sin)  # [B K T E]
        v = v.swapaxes(1, 2)

        own = ()
        if isinstance(slots, Unrolled):
            slots = Unrolled(slots.k, slots.v, (*slots.added, (k, v)))
            k, v, own = slots
        else:
            if slots is not None:
                assert block.start is not None
                k = kv_cache.write(slots[0], k, block.start)
                v = kv_cache.write(slots[1], v, block.start)
            slots = k, v
        out = attend_block(
            q,
            k,
            v,
            block,
            window=self.window,
            own=own,
            implementation=self.implementation,
        )
        return self.project(out), slots

    def project(self, out: Float[Array, "B T _D"]) -> Float[Array, "B T D"]:
        """The heads' output in the stack's width."""
        c, normal = self.config, nn.initializers.normal(0.02)
        shape = c.width, c.num_heads * c.head_width
        out = dense(out, self.param("out", normal, shape))
        if c.out_bias:
            bias = self.param("out_bias", nn.initializers.zeros, (c.width,))
            out = out + bias[None, None]
        return out


class Layer(nn.Module):
    """Attention and gated MLP, each behind a norm and a residual."""

    config: TransformerConfig
    window: int | None = None
    norm_input: bool = True  # False: attention reads the residual stream itself
    implementation: str | None = None

    @nn.compact
    def __call__(self, x, block: Block, slots):
        c = self.config
        a = RMSNorm(c.norm_eps, name="input_norm")(x) if self.norm_input else x
        attention = Attention(c, self.window, self.implementation, name="attention")
        a, slots = attention(a, block, slots)
        x = x + a
        m = RMSNorm(c.norm_eps, name="post_norm")(x)
        return x + GatedMLP(c.mlp_width, c.mlp_bias, name="mlp")(m), slots


def layer_of(
    config: TransformerConfig, i: int, implementation: str | None = None
) -> nn.Module:
    """Layer i of a stack."""
    return of_layers(Layer)(config, config.window(i), implementation=implementation)


class Transformer(nn.Module):
    """The stack with its embedding and head.

    Parameters: `embed` [V D], `layer_{i}`, `norm`, and `head` [V D] if it is not tied.
    """

    config: TransformerConfig
    attention: str | None = None  # implementation of `tree_attention`; None chooses

    def setup(self):
        c = self.config
        normal = nn.initializers.normal(0.02)
        self.embed = self.param("embed", normal, (c.vocab_size, c.width))
        self.layer = [self.make_layer(i) for i in range(c.num_layers)]
        self.norm = self.make_norm()
        if not c.tie_embeddings:
            self.param("head", normal, (c.vocab_size, c.width))  # read by `tables`

    def make_layer(self, i: int) -> nn.Module:
        """Layer i; a stack of another kind of layers makes its own."""
        return layer_of(self.config, i, self.attention)

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.config.norm_eps)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache | None = None,
        *,
        ancestors: np.ndarray | Bool[Array, "#B T M"] | None = None,
        depths: np.ndarray | Int[Array, "#B M"] | None = None,
        behind: int | Int[Array, ""] = 0,
        taps: Sequence[int] = (),
    ) -> Output:
        """Runs T tokens of each row that follow the row's committed slots.

        Args:
          cache: None runs a whole text with nothing before it.
          ancestors: True where the column's token is visible to the row's, [T T] or one
            per row [B T T]; None is a chain (causal).
          depths: position of each token after the first, [T] or [B T]; None counts up.
          behind: uncommitted tokens that earlier passes wrote after the committed
            slots; this pass's follow them. `ancestors` and `depths` then have M
            columns, one per uncommitted slot in use, earlier passes' first.
          taps: indices into the L + 1 states as `transformers` counts them: 0 the
            embedding, i the output of layer i - 1, L (or -1) the state after the final
            norm. The raw output of the last layer is not offered.
        """
        x = sharding.look_up(self.embed, tokens)
        return self.run(x, cache, ancestors, depths, taps, behind)

    def run(self, x, cache, ancestors, depths, taps, behind: Any = 0) -> Output:
        """`__call__` for tokens that are already embedded, [B T D]."""
        x = x if cache is not None else sharding.constrain_batch(x)
        block = locate(self.config, x.shape[:2], cache, ancestors, depths, behind)
        states, layers = [x], []
        for i, layer in enumerate(self.layer):
            slots = None if cache is None else (cache.k[i], cache.v[i])
            x, slots = layer(x, block, slots)
            states.append(x)
            layers.append(slots)

        states[-1] = hidden = self.norm(x)
        if cache is not None:
            k, v = zip(*layers, strict=True)
            cache = KVCache(k=k, v=v, length=cache.length)
        features = jnp.concatenate([states[t] for t in taps] or [x[..., :0]], axis=-1)
        return Output(hidden, features, cache)


def locate(config, shape, cache, ancestors, depths, behind=0) -> Block:
    """Positions, angles and visibility of a pass; `ancestors` may be a `Sees`."""
    B, T = shape
    groups = config.num_heads // config.num_kv_heads
    if cache is None and ancestors is None and is_long(groups, T):
        places = jnp.arange(T, dtype=jnp.int32) if depths is None else depths
        places = jnp.broadcast_to(jnp.asarray(places), (B, T))
        ancestors, depths = Sees((places,), (places,), earlier), places
    if isinstance(ancestors, Sees):
        cos, sin = rotary(config.rope, depths, config.head_width)
        return Block(cos, sin, depths, depths, ancestors, None)
    ancestors = np.tri(T, dtype=bool) if ancestors is None else ancestors
    ancestors = jnp.asarray(ancestors)
    ancestors = ancestors if ancestors.ndim == 3 else ancestors[None]
    M = ancestors.shape[2]
    depths = jnp.arange(M, dtype=jnp.int32) if depths is None else jnp.asarray(depths)
    depths = jnp.broadcast_to(depths, (B, M))
    own = jax.lax.dynamic_slice_in_dim(depths, behind, T, axis=1)
    if cache is None:
        cos, sin = rotary(config.rope, own, config.head_width)
        mask = jnp.tile(ancestors, (1, groups, 1))
        return Block(cos, sin, own, depths, mask, None)

    start = cache.length
    slot = jnp.arange(cache.size, dtype=jnp.int32)
    node = slot[None] - start[:, None]  # [B S]: which of the M tokens sits there
    inside = (node >= 0) & (node < M)
    index = jnp.clip(node, 0, M - 1)
    seen = jnp.take_along_axis(
        jnp.broadcast_to(ancestors, (B, T, M)),
        jnp.broadcast_to(index[:, None], (B, T, cache.size)),
        axis=2,
    )
    mask = jnp.tile((node < 0)[:, None] | (inside[:, None] & seen), (1, groups, 1))
    depth = jnp.take_along_axis(depths, index, axis=1)
    key_positions = jnp.where(inside, start[:, None] + depth, slot[None])
    positions = start[:, None] + own
    cos, sin = rotary(config.rope, positions, config.head_width)
    nodes = start, jnp.broadcast_to(ancestors, (B, T, M)), depths
    return Block(cos, sin, positions, key_positions, mask, start + behind, nodes)


def unrolled(
    config: TransformerConfig,
    batch_size: int,
    rows: np.ndarray,
    length: int,
    passes: int,
) -> Block:
    """A pass over `rows` of a text of `length` tokens after `passes` of its own.

    Row t stands at position t + passes and sees the text up to t.
    """
    own = jnp.asarray(rows + passes, jnp.int32)
    own = jnp.broadcast_to(own, (batch_size, len(rows)))
    text = jnp.arange(length, dtype=jnp.int32)
    text = jnp.broadcast_to(text, (batch_size, length))
    cos, sin = rotary(config.rope, own, config.head_width)
    seen = jnp.asarray(np.tri(length, dtype=bool)[rows])[None]
    mask = jnp.tile(seen, (1, config.num_heads // config.num_kv_heads, 1))
    return Block(cos, sin, own, text, mask, None)


@pytree
class Shared:
    """What drafters read of the target and never train: its tables, and its cache."""

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"]
    # The model's keys and values of the committed text while drafts are made of it, for
    # a drafter that attends to them; None elsewhere.
    cache: KVCache | None = None
    embed_scale: float = static(default=1.0)  # of a table's row as the stack reads it
    softcap: float | None = static(default=None)  # logits stay within +- this

    def embedding(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """What the stack reads of tokens, the scale rounded to the table's dtype."""
        x = sharding.look_up(self.embed, tokens)
        if self.embed_scale == 1.0:
            return x
        return x * jnp.asarray(self.embed_scale, x.dtype)

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """The head in float32: ties in bf16 would change greedy output."""
        logits = dense(hidden, self.head, jnp.float32)
        if self.softcap is None:
            return logits
        return self.softcap * jnp.tanh(logits / self.softcap)


def tables(config: TransformerConfig, params: Params) -> Shared:
    """Embedding and head of a stack's parameters, whether tied or not."""
    head = params["embed" if config.tie_embeddings else "head"]
    return Shared(embed=params["embed"], head=head)
