"""P-EAGLE: EAGLE-3's pairs, then learned placeholder pairs: a block in one deeper pass.

Hui et al. 2026, arXiv:2602.01469; public code: vllm-project/speculators c05b95b and
sgl-project/SpecForge a6b6b02. With F_t some states of the target at position t side by
side and e(.) a table of the drafter's own, the pair (F_t, x_{t+1}) stands at position t
as in EAGLE-3. Behind the last real pair of a text come K - 1 placeholders (F*, m): one
learned feature F*, of the width of F, and the row of one unused id m in the table. All
go through

    g = W_fc F                                                        (1)
    r = g + Attn([RMS(e); RMS(g)]);  r = r + MLP(RMS(r))              (2)
    r = r + Attn(RMS(r));  r = r + MLP(RMS(r))     each further layer  (3)
    q = softmax(U RMS(r))                                             (4)

in one causal pass: the last real pair (F_t, x_{t+1}) gives the law of x_{t+2}, the
placeholder at t + d that of x_{t+d+2}. A draft costs one pass, not K, and no place of
it knows what was drafted before it: hence more layers than EAGLE-3 has.

Training flattens the placeholders behind all anchors of a text into one pass
(`parallel`: rows (a, d), conditional drop of tokens). Depth d keeps, of n tokens to
learn, floor((n - d) max(rate^d, floor)) rows, and with p the target's law

    loss = mean of CE(p_{a+d+2}, row (a, d)) over all kept rows of all depths      (5)

Which row sees which depends on no text: `mask_table` holds it for all rows, place by
place, so that the table of a shorter text is its top left corner, and a step looks up
the rows that it kept.

A text too long for one pass is cut into `segments` whose gradients add up to that of
(5). A segment holds all real pairs, as keys, and a share of the placeholders, in order
of anchor; a chain cut in two is repeated as keys. Its own rows alone have a loss and
logits. The segments are of one size, so one compiled pass is run for each in turn and
its intermediate values are gone before the next: the price is that they are computed
again for the gradient. The code cuts at fixed places instead, where the rows that fall
into a segment are not known before the draw.

Departs from the code: anchors before the text and rows without a label are never drawn
(speculators has the former, and keeps at most so many anchors); a row counts if the
token it reads past, x_{a+d+1}, is to be learned, its label behind it or not; no noise
on features; the draft vocabulary is the target's; weights start as normal noise of
deviation 0.02, F* of deviation 1.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_tree, kv_cache, sharding
from specjax.drafters import base, eagle3, parallel, recurrent
from specjax.drafters.base import Batch, Card
from specjax.drafters.parallel import IDLE, Rows
from specjax.drafters.recurrent import State
from specjax.kv_cache import KVCache
from specjax.layers import dense, of_layers
from specjax.transformer import Layer, Shared, TransformerConfig, locate
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Bool, Float, Int, Params, PRNGKey


class Net(eagle3.Net):
    """Eq. 1 to 3. Parameters: those of EAGLE-3, `mask_feature`, `deeper_{i}`."""

    drafter: "PEagle"

    def setup(self):
        super().setup()
        c = self.drafter.config
        width = len(self.drafter.target_states) * c.width
        normal = nn.initializers.normal(1.0)
        self.mask_feature = self.param("mask_feature", normal, (width,))
        self.deeper = [of_layers(Layer)(c) for _ in range(c.num_layers - 1)]

    def __call__(
        self,
        e: Float[Array, "B T D"],
        features: Float[Array, "B T MD"],
        is_mask: Bool[Array, "B T"],
        block,
        slots,
    ):
        """What U reads, and each layer's keys and values."""
        learned = self.mask_feature.astype(features.dtype)[None, None]
        learned = jnp.broadcast_to(learned, features.shape)
        g = self.fuse(jnp.where(is_mask[..., None], learned, features))
        x, kv = self.layer(e, g, block, slots[0])
        written = [kv]
        for layer, own in zip(self.deeper, slots[1:], strict=True):
            x, kv = layer(x, block, own)
            written.append(kv)
        return self.norm(x), written


@dataclasses.dataclass(frozen=True)
class PEagle:
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="features of several layers, tokens",
        passes="1",
        trained="layers, fusion, table",
        paper="Hui et al., arXiv:2602.01469",
        year=2026,
    )

    config: TransformerConfig  # of the layers; its width is the target's
    target_states: tuple[int, ...]  # i: the state that enters the target's layer i
    mask_token_id: int  # an id that no text holds
    gamma: int = 7  # drafted tokens per round
    blocks: int = 8  # K, depths trained
    rate: float = 0.7  # of the tokens kept from one depth to the next
    floor: float = 0.2  # share of the tokens kept at any depth
    segments: int = 1  # passes that a training text is cut into
    share_head: bool = True  # False: a head of our own, started as the target's
    norm_before_residual: bool = False  # eq. 2 adds to RMS(g)
    norm_before_fc: bool = False  # one norm of F
    fc_norm: bool = False  # a norm of each state of F
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        for name in ("gamma", "blocks", "segments"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"p_eagle needs {name} >= 1, got {getattr(self, name)}."
                )
        if not (0 < self.rate <= 1 and 0 <= self.floor <= 1):
            raise ValueError(
                f"p_eagle keeps shares of the tokens: rate={self.rate} must be in "
                f"(0, 1] and floor={self.floor} in [0, 1]."
            )
        if not 0 <= self.mask_token_id < self.config.vocab_size:
            raise ValueError(
                f"p_eagle has mask_token_id={self.mask_token_id}; choose an unused one "
                f"of the {self.config.vocab_size} ids."
            )
        eagle3.check_states(self)

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """A quarter of the target's layers, 2 to 4; the states that EAGLE-3 reads."""
        if mask_token_id is None and "mask_token_id" not in fields:
            raise ValueError(
                "p_eagle needs a mask token and the target's tokenizer names none; "
                "give mask_token_id, an id that no text holds."
            )
        some = {k: v for k, v in fields.items() if k == "target_states"}
        one = eagle3.Eagle3.for_target(config, None, **some)
        num_layers = min(4, max(2, config.num_layers // 4))
        defaults = {
            "config": dataclasses.replace(one.config, num_layers=num_layers),
            "target_states": one.target_states,
            "mask_token_id": mask_token_id,
        }
        return cls(**defaults | fields)

    @property
    def tree(self) -> Tree | DynamicTree:
        return self.topology or Tree.chain(self.gamma)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.target_states

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        recurrent.check_target(self, shared)
        c = self.config
        features = jnp.zeros((1, 1, len(self.target_states) * c.width))
        e, block = features[..., : c.width], locate(c, (1, 1), None, None, None)
        args = e, features, jnp.zeros((1, 1), bool), block, [None] * c.num_layers
        params: Params = Net(self).init(key, *args)["params"]
        copy = lambda x: x.astype(params["fc"].dtype)
        # As the target's stack reads it, scale included.
        mine = {"embed": copy(shared.embedding(jnp.arange(c.vocab_size)))}
        if not self.share_head:
            mine["head"] = copy(shared.head)
        return {**params, **mine}

    def run(self, params, tokens, features, is_mask, block, slots) -> Any:
        """Eq. 1 to 3: what U reads [B T D], and keys and values of each layer."""
        net = {k: v for k, v in params.items() if k not in ("embed", "head")}
        e = sharding.look_up(params["embed"], tokens)
        args = e, features, is_mask, block, slots
        return Net(self).apply({"params": net}, *args)

    def logits(self, params, shared: Shared, x: Float[Array, "B *T D"]) -> Array:
        """Eq. 4 before the softmax."""
        if self.share_head:
            return shared.logits(x)
        return dense(x, params["head"], jnp.float32)

    def cached(self, params, tokens, features, is_mask, cache: KVCache):
        """`run` behind a cache, which comes back with the entries written."""
        block = locate(self.config, tokens.shape, cache, None, None)
        slots = list(zip(cache.k, cache.v, strict=True))
        x, slots = self.run(params, tokens, features, is_mask, block, slots)
        k, v = zip(*slots, strict=True)
        return x, KVCache(k, v, cache.length)

    def prefill(self, params, shared, tokens, lengths, features, cache_size) -> State:
        c, (B, T), P = self.config, tokens.shape, self.tree.depth + 1
        empty = kv_cache.init(
            c.num_layers,
            B,
            c.num_kv_heads,
            cache_size + P,
            c.head_width,
            shared.embed.dtype,
        )
        args = base.shift(tokens, 1), features, jnp.zeros((B, T), bool), empty
        _, cache = self.cached(params, *args)
        return recurrent.read_text(cache, P, tokens, features, lengths)

    def draft(self, params, shared, state: State, anchor, sampling, keys):
        rows, depth = jnp.arange(anchor.shape[0])[:, None], self.tree.depth
        tokens, pair, drafts = parallel.fill(state, anchor, self.mask_token_id, depth)
        is_mask = jnp.arange(tokens.shape[1])[None] >= state.num_fresh[:, None]
        args = tokens, state.features[rows, pair], is_mask, state.cache
        x, cache = self.cached(params, *args)
        logits = self.logits(params, shared, x[rows, drafts])
        draft = draft_tree.from_laws(self.tree, logits, sampling, keys)
        # The placeholders' entries stay past `length`, where nothing sees them.
        return draft, dataclasses.replace(state, cache=cache)

    def commit(self, params, shared, state: State, verdict, tokens, features) -> State:
        del params, shared
        return recurrent.append(state, tokens, features, verdict.num_committed)

    def rows(self, key: PRNGKey, mask: Bool[Array, "B T"]) -> Rows:
        """The rows of training texts: real pairs, then placeholders by place."""
        T, wanted = mask.shape[1], base.shift(mask, 1)
        kept = lambda n: [
            parallel.num_kept(max(0, n - d), d, self.rate, self.floor)
            for d in range(1, self.blocks)
        ]
        sizes = np.array([kept(n) for n in range(T + 1)], int)
        n = jnp.sum(wanted, axis=1)
        rows = parallel.drop(key, wanted, n, sizes, first=0)
        number = jnp.sort(self.numbers(rows, T)[:, T:], axis=1)  # idle ones come last
        K, real = self.blocks, number < T * self.blocks
        anchor = jnp.where(real, number // K, IDLE)
        depth = jnp.where(real, number % K, 1)  # of depth 0 all would see them
        join = lambda x, y: jnp.concatenate([x[:, :T], y.astype(jnp.int32)], axis=1)
        return Rows(join(rows.anchor, anchor), join(rows.depth, depth))

    def numbers(self, rows: Rows, T: int) -> Int[Array, "B R"]:
        """Rows counted place by place; idle ones are past the last."""
        number = rows.anchor * self.blocks + rows.depth
        return jnp.where(rows.real, number, T * self.blocks)

    def states(self, params, batch: Batch, rows: Rows, sees) -> Array:
        """What U reads at rows of the flattened texts [B R D]; see `parallel.sees`."""
        is_mask = rows.depth > 0
        tokens = rows.read(batch.tokens, rows.anchor + 1)  # at the end of a text: none
        tokens = jnp.where(is_mask, jnp.int32(self.mask_token_id), tokens)
        tokens = sharding.constrain_batch(tokens)
        features = sharding.constrain_batch(rows.read(batch.features, rows.anchor))
        shape = rows.anchor.shape
        block = locate(self.config, shape, None, sees, rows.position)
        args = tokens, features, is_mask, block, [None] * self.config.num_layers
        return self.run(params, *args)[0]

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 5; "alpha" is of drafts from every THIN-th place, nothing dropped."""
        rows = self.rows(key, batch.mask)
        total = self.total(params, shared, batch, rows)
        count = jnp.sum(rows.read(batch.mask, rows.position + 1)).astype(jnp.float32)
        frozen = jax.lax.stop_gradient(params)

        def logits(rows, where):
            sees = parallel.sees(self.config, rows)
            x = self.states(frozen, batch, rows, sees)[:, where]
            return self.logits(frozen, shared, x)

        logs = parallel.judge(logits, shared, batch, self.tree.depth, offset=1)
        return total / jnp.maximum(count, 1.0), logs

    def total(self, params, shared, batch: Batch, rows: Rows) -> Float[Array, ""]:
        """The sum of eq. 5, segment by segment."""
        T, R, S = batch.tokens.shape[1], rows.anchor.shape[1], self.segments
        lead = 0 if S == 1 else max(self.blocks - 2, 0)  # of a chain that is cut
        # On a mesh that splits texts by tokens each part of a segment divides evenly.
        ways = sharding.sequence_ways(*batch.tokens.shape)
        share = lambda n: -(-n // ways) * ways
        lead, own_text, own_masks = map(share, (lead, -(-T // S), -(-(R - T) // S)))
        small = T * self.blocks <= TABLE
        table = jnp.asarray(mask_table(T if small else 1, self.blocks))

        def segment(params, s):
            at = T + s * own_masks + jnp.arange(-lead, own_masks)
            inside = ((at >= T) & (at < R))[None]
            at = jnp.clip(at, 0, R - 1)
            pick = lambda x, idle: jnp.concatenate(
                [x[:, :T], jnp.where(inside, x[:, at], idle)], axis=1
            )
            some = Rows(pick(rows.anchor, IDLE), pick(rows.depth, 1))
            number = jnp.minimum(self.numbers(some, T), T * self.blocks - 1)
            if small:
                sees = table[number[:, :, None], number[:, None, :]]
            else:
                sees = parallel.sees(self.config, some)
            x = self.states(params, batch, some, sees)

            text = s * own_text + jnp.arange(own_text)
            own = jnp.concatenate(
                [jnp.minimum(text, T - 1), T + lead + jnp.arange(own_masks)]
            )
            mine = Rows(some.anchor[:, own], some.depth[:, own])
            x = sharding.constrain_batch(x[:, own])
            place = mine.position + 1
            wanted = mine.read(batch.mask, place)
            wanted &= jnp.pad(text < T, (0, own_masks), constant_values=True)[None]
            logits = functools.partial(self.logits, params, shared)
            ce = base.law_losses(logits, x, shared, mine.read(batch.hidden, place))
            return jnp.sum(jnp.where(wanted, ce, 0.0))

        if S == 1:
            return segment(params, jnp.int32(0))
        # Only a segment's number is kept for the gradient, the rest is made again.
        one = jax.checkpoint(segment)
        step = lambda total, s: (total + one(params, s), None)
        return jax.lax.scan(step, jnp.float32(0), jnp.arange(S, dtype=jnp.int32))[0]


TABLE = 4096  # places: a table of more would outgrow what segments save


@functools.lru_cache(maxsize=4)
def mask_table(num_places: int, blocks: int) -> np.ndarray:
    """Which row sees which, of all rows of a text counted place by place [TK TK].

    Row a K + d is (a, d). Of fewer places it is the top left corner.
    """
    anchor, depth = np.divmod(np.arange(num_places * blocks), blocks)
    return parallel.visible((anchor, depth), (anchor, depth))
