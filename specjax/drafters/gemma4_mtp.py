"""Gemma 4's MTP drafter: four layers that attend to the target's own keys and values.

Google 2026, the `gemma-4-*-it-assistant` weights (Apache-2.0) as `transformers` 5.24
and vLLM run them; the recipe of their training is not public. With h the state that the
target's head reads at the position before the anchor x, e(.) its embedding,

    u = W_pre [e(x); h]                                                     (1)
    u = layer_i(u), i = 1..4: local, local, local, full; queries alone, keys
        and values those of the target's last layer of that kind            (2)
    z = RMS(u);  q = softmax(T z)          T the drafter's own table        (3)
    h' = W_post z                                                           (4)

and the next step reads (d, h') for a drafted token d. There is no cache to fill and
none to rewind. The anchor and all drafted tokens stand at one position and see the same
keys, those of the committed text: what a step knows of the ones before it is in h'
alone. The layers are Gemma 4's own (`gemma.py`). Engines differ by one in that
position, n - `back` for an anchor at n: vLLM, the TPU engine and mlx-vlm take 1,
`transformers` and LiteRT 0, and `transformers` a window of one key more (`more_keys`).

`order` makes T a clustered head (E2B, E4B), its rows kept cluster by cluster: only the
tokens of the best clusters are scored, the others cannot be drafted
(`clustered_head.py`). `transformers` gives those a finite logit, which is not what is
sampled from; here they have probability 0.

Trained as it is used: from each row t of a text,

    loss = sum_k decay^(k-1) CE(p_{t+1+k}, q_k) / sum_k decay^(k-1)         (5)

step k reading x_{t+k} and the keys up to t, never another row. A drafter with clusters
trains their centroids alone: it is made of one that is trained already.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax import clustered_head, draft_tree, gemma
from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.gemma import GemmaConfig
from specjax.layers import dense, of_layers, rotary
from specjax.mla import DeepSeekConfig
from specjax.pytree import pytree
from specjax.transformer import Block, Shared, TransformerConfig
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Float, Int, Params, PRNGKey

WINDOW = 512  # keys that local layers see where the target's own see all


@pytree
class State:
    hidden: Float[Array, "B D"]  # h: the state that the anchor was drawn from


class Net(nn.Module):
    """Eq. 1, 2 and 4, and the norm of 3; `more_keys` as `Gemma4MTP` has it."""

    config: GemmaConfig
    target_width: int
    more_keys: int = 0

    @nn.compact
    def __call__(
        self,
        e: Float[Array, "B T W"],
        h: Float[Array, "B T W"],
        blocks: tuple[Block, Block],
        slots: tuple[tuple[Array, Array], ...],
    ) -> tuple[Array, Array]:
        """z and h'; `blocks` are of local and of full layers, `slots` one a layer."""
        c, W, normal = self.config, self.target_width, nn.initializers.normal(0.02)
        pre = self.param("pre", normal, (c.width, 2 * W))
        u = dense(jnp.concatenate([e, h], axis=-1), pre)
        for i, window in enumerate(c.windows):
            full = window is None
            if window is not None:  # it counts the anchor's slot too, which is empty
                window += 1 + self.more_keys
            layer = of_layers(gemma.Layer)(c, full, window, False, name=f"layer_{i}")
            u, _ = layer(u, blocks[full], slots[i])
        z = gemma.Norm(c.norm_eps, name="norm")(u)
        return z, dense(z, self.param("post", normal, (W, c.width)))


@dataclasses.dataclass(frozen=True)
class Gemma4MTP:
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="last feature, tokens, the target's cache",
        passes="gamma",
        trained="four layers, a table",
        paper="Google, Gemma 4 weights",
        year=2026,
    )

    config: GemmaConfig  # of the layers; kv heads and angles are those of `sources`
    target_width: int
    sources: tuple[int, ...]  # the target's layer that each layer attends to
    gamma: int = 4  # drafted tokens per round
    unroll: int | None = None  # steps trained; None: as many as are drafted
    decay: float = 0.8  # step k weighs decay^(k-1) in the loss
    back: int = 1  # 0 or 1: the anchor at n stands at n - back
    more_keys: int = 0  # 0 or 1: keys beyond the window that a local layer sees
    order: tuple[
        int, ...
    ] = ()  # token of each slot, cluster by cluster; (): no clusters
    num_clusters: int = 0
    num_scored: int = 32  # clusters whose tokens are scored
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        if self.gamma < 1:
            raise ValueError(f"gemma4_mtp needs gamma >= 1, got {self.gamma}.")
        if self.unroll is not None and self.unroll < 1:
            raise ValueError(f"gemma4_mtp needs unroll >= 1, got {self.unroll}.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"gemma4_mtp needs 0 < decay <= 1, got {self.decay}.")
        if len({w for w in self.config.windows if w is not None}) > 1:
            raise ValueError(
                f"gemma4_mtp has one window for all local layers, got "
                f"{self.config.windows}."
            )
        for name in ("back", "more_keys"):
            if getattr(self, name) not in (0, 1):
                raise ValueError(
                    f"gemma4_mtp: {name} is 0 or 1, got {getattr(self, name)}."
                )
        c = self.config
        if len(self.sources) != c.num_layers or c.num_owners:
            raise ValueError(
                f"gemma4_mtp has {c.num_layers} layers, {c.num_owners} with keys of "
                f"their own, and {len(self.sources)} sources; each of its layers reads "
                "a layer of the target: num_shared_layers = num_layers."
            )
        if self.order:
            clustered_head.check_order(
                np.array(self.order), c.vocab_size, self.num_clusters
            )
            if not 1 <= self.num_scored <= self.num_clusters:
                raise ValueError(
                    f"gemma4_mtp scores 1 to {self.num_clusters} clusters "
                    f"(--clusters-scored), got num_scored={self.num_scored}."
                )
        elif self.num_clusters:
            raise ValueError(
                f"num_clusters={self.num_clusters} without an order of the tokens; "
                "`specjax train gemma4_mtp --init FOLDER --clusters C` makes one."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """Three local layers and a full one, half as wide as the target.

        The released ones are a tenth to a third as wide, with an MLP of 8 widths in
        place of 4. Their tables start at deviation 0.02, here at width^-1/2.
        Each reads the last layer of its kind that has keys. Of a target whose layers
        all see the whole text, the local ones read the last but one.
        """
        del mask_token_id
        if isinstance(config, DeepSeekConfig):
            raise ValueError(
                "gemma4_mtp attends to keys and values of heads; a target of latent "
                "attention caches none. Use mtp."
            )
        own = config if isinstance(config, GemmaConfig) else None
        num_owners = own.num_owners if own else config.num_layers
        windows = [config.window(i) for i in range(num_owners)]
        full = [i for i, w in enumerate(windows) if w is None] or [num_owners - 1]
        local = [i for i, w in enumerate(windows) if w is not None]
        local = local or full[-2:-1] or full
        width = max(config.width // 2, 8)
        layers = GemmaConfig(
            vocab_size=config.vocab_size,
            width=width,
            num_layers=4,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_width=config.head_width,
            mlp_width=4 * width,
            rope=config.rope,
            norm_eps=config.norm_eps,
            max_positions=config.max_positions,
            windows=(windows[local[-1]] or WINDOW,) * 3 + (None,),
            full_kv_heads=own and own.full_kv_heads,
            full_head_width=own and own.full_head_width,
            full_rope=own.full_rope if own else config.rope,
            query_scale=own.query_scale if own else config.head_width**-0.5,
            num_shared_layers=4,
            layer_scale=True,
        )
        values: dict[str, Any] = {
            "config": layers,
            "target_width": config.width,
            "sources": (local[-1],) * 3 + (full[-1],),
        }
        return cls(**values | fields)

    @property
    def tree(self) -> Tree | DynamicTree:
        return self.topology or Tree.chain(self.gamma)

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.sources)))

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        c, (V, W) = self.config, shared.embed.shape
        self.check_target(V, W)
        net_key, head_key, key = jax.random.split(key, 3)
        x = jnp.zeros((1, 1, W), jnp.float32)
        kinds = [c.kind(window is None) for window in c.windows]
        nothing = [jnp.zeros((1, k.num_kv_heads, 1, k.head_width)) for k in kinds]
        slots = tuple((x, x) for x in nothing)
        blocks = self.blocks(jnp.ones((1, 1), jnp.int32), 1)
        normal = nn.initializers.normal(c.width**-0.5)
        net = Net(c, W, self.more_keys).init(net_key, x, x, blocks, slots)["params"]
        head = normal(head_key, (V, c.width))
        if not self.order:
            return {"net": net, "head": head}
        centroids = normal(key, (self.num_clusters, c.width))
        return clustered(self, {"net": net, "head": head, "centroids": centroids})

    def check_target(self, V: int, W: int) -> None:
        """Refuses a target of other ids or another width."""
        if (self.config.vocab_size, self.target_width) != (V, W):
            raise ValueError(
                f"gemma4_mtp is made for {self.config.vocab_size} ids of width "
                f"{self.target_width}; the target has {V} of width {W}."
            )

    def blocks(
        self, n: Int[Array, "B T"], size: int, nodes: Any = None
    ) -> tuple[Block, Block]:
        """Of local and of full layers, for anchors at n that see slots below n.

        The window is the layers' own. `nodes` are those of `transformer.Block`.
        """
        c, slot = self.config, jnp.arange(size, dtype=jnp.int32)
        keys = jnp.broadcast_to(slot[None], (n.shape[0], size))
        made = []
        for full in (False, True):
            kind = c.kind(full)
            cos, sin = rotary(kind.rope, n - self.back, kind.head_width)
            mask = slot[None, None] < n[..., None]
            mask = jnp.tile(mask, (1, c.num_heads // kind.num_kv_heads, 1))
            made.append(Block(cos, sin, n, keys, mask, None, nodes))
        return made[0], made[1]

    def step(self, params, shared: Shared, tokens, h, blocks, slots):
        """Eq. 1 to 4 without the softmax: z and h' [B T ..]."""
        net = Net(self.config, self.target_width, self.more_keys)
        e = shared.embedding(tokens)
        out: Any = net.apply({"params": params["net"]}, e, h, blocks, slots)
        return out

    def logits(self, params, z: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """T z, with clusters only where it is scored."""
        if not self.order:
            return dense(z, params["head"], jnp.float32)
        scored = clustered_head.score(
            z, params["centroids"], params["clusters"], self.tokens, self.num_scored
        )
        return clustered_head.spread(scored, self.config.vocab_size)

    @property
    def tokens(self) -> Array:
        """The token of each slot [C R]."""
        order = np.array(self.order, np.int32).reshape(self.num_clusters, -1)
        return jnp.asarray(order)

    def prefill(self, params, shared, tokens, lengths, features, cache_size) -> State:
        del params, shared, cache_size
        return State(features[jnp.arange(tokens.shape[0]), lengths - 1])

    def draft(self, params, shared: Shared, state: State, anchor, sampling, keys):
        cache = shared.cache
        assert cache is not None, "drafting needs the target's cache"
        slots = tuple((cache.k[i], cache.v[i]) for i in self.sources)
        self._check(slots)

        def step(carry, tokens, h, sees, level):
            del sees, level  # each node knows the ones above it by h alone
            n = jnp.broadcast_to(cache.length[:, None], tokens.shape)
            # Nothing is uncommitted: one slot that no node sees.
            unseen = jnp.zeros((*n.shape, 1), bool), jnp.zeros_like(n[:, :1])
            blocks = self.blocks(n, cache.size, (cache.length, *unseen))
            z, h = self.step(params, shared, tokens, h, blocks, slots)
            return self.logits(params, z), h, carry

        first = anchor[:, None], state.hidden[:, None]
        logits, h, _ = step(None, *first, None, None)
        draft, _ = draft_tree.grow_from(
            self.tree, logits[:, 0], h[:, 0], step, None, sampling, keys
        )
        return draft, state

    def _check(self, slots) -> None:
        for i, window, (k, _) in zip(
            self.sources, self.config.windows, slots, strict=True
        ):
            kind = self.config.kind(window is None)
            if (k.shape[1], k.shape[3]) != (kind.num_kv_heads, kind.head_width):
                raise ValueError(
                    f"gemma4_mtp is made for {kind.num_kv_heads} kv heads of width "
                    f"{kind.head_width}; layer {i} of the target has {k.shape[1]} of "
                    f"width {k.shape[3]}."
                )

    def commit(self, params, shared, state: State, verdict, tokens, features) -> State:
        del params, shared, state, tokens
        rows = jnp.arange(features.shape[0])
        return State(features[rows, verdict.num_accepted])

    def states(
        self, params, shared: Shared, batch: Batch, num_steps: int
    ) -> list[Float[Array, "B T D"]]:
        """z of each step at every row, on the tokens of the text itself.

        Row t of step k reads x_{t+k} and says what follows it.
        """
        (B, T), at = batch.tokens.shape, self.kv_layers.index
        slots = tuple(batch.kv[at(i)] for i in self.sources)
        self._check(slots)
        n = jnp.broadcast_to(jnp.arange(1, T + 1, dtype=jnp.int32)[None], (B, T))
        blocks, h, found = self.blocks(n, T), batch.features, []
        for k in range(1, num_steps + 1):
            tokens = base.shift(batch.tokens, k)
            z, h = self.step(params, shared, tokens, h, blocks, slots)
            found.append(z)
        return found

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 5 over rows whose label is to be learned; eq. 3 of clusters instead."""
        del key
        trained, G = self.unroll or self.tree.depth, self.tree.depth
        states = self.states(params, shared, batch, max(trained, G))

        def values(zs, hidden):
            p = jax.nn.softmax(shared.logits(hidden), axis=-1)
            return [self._distance(params, z, p) for z in zs]

        scores, late = trained * shared.embed.shape[0], base.late(states[:trained])
        losses = base.few_places(values, scores, late, batch.hidden)
        ce = base.late_means(losses, base.shift(batch.mask, 1))
        w = self.decay ** np.arange(trained, dtype=np.float32)
        laws = [self.logits(params, z[:, :: base.THIN]) for z in states[:G]]
        logs = base.step_acceptance(laws, shared, batch)
        return jnp.sum(ce * (w / w.sum())), {"ce": ce} | logs

    def _distance(self, params, z, p: Float[Array, "B T V"]) -> Float[Array, "B T"]:
        if not self.order:
            return base.soft_cross_entropy(self.logits(params, z), p)
        scores = dense(jax.lax.stop_gradient(z), params["centroids"], jnp.float32)
        return base.soft_cross_entropy(scores, clustered_head.mass(p, self.tokens))


def with_clusters(
    drafter: Gemma4MTP, params: Params, num_clusters: int, num_scored: int
) -> tuple[Gemma4MTP, Params]:
    """A trained drafter with its table in clusters, their centroids the means.

    Train it further: its loss then moves the centroids alone.
    """
    if drafter.order:
        raise ValueError(
            f"the drafter has {drafter.num_clusters} clusters already; start from the "
            "one that they were made of."
        )
    # The settings first: parting a large table takes minutes.
    order = tuple(range(drafter.config.vocab_size))
    fields = {"num_clusters": num_clusters, "num_scored": num_scored}
    drafter = dataclasses.replace(drafter, order=order, **fields)
    order, means = clustered_head.build(np.asarray(params["head"]), num_clusters)
    drafter = dataclasses.replace(drafter, order=tuple(order.ravel().tolist()))
    centroids = jnp.asarray(means, params["head"].dtype)
    return drafter, clustered(drafter, dict(params) | {"centroids": centroids})


def clustered(drafter: Gemma4MTP, params: Params) -> Params:
    """Parameters of a drafter with an order, of those with its head as published."""
    rest = {name: x for name, x in params.items() if name != "head"}
    rows = clustered_head.in_clusters(params["head"], drafter.tokens)
    return rest | {"clusters": rows}
