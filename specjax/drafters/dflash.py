"""DFlash: a block of masks is filled in one bidirectional pass over target features.

Chen, Liang, Liu 2026, arXiv:2602.06036, sections 3 and 4; reference code z-lab/dflash
44947fb. With F_t the raw outputs of M target layers at position t, side by side, and
e(.) the target's embedding, a draft at anchor position s is

    H_t = RMS(F_t W_c)                 for t < s, the same H for every layer      (1)
    X   = [e(anchor), e(mask), ..., e(mask)]             G + 1 slots              (2)
    q = N W_q,  [k, v] = [H; N] W_kv,  N = RMS(X)        norms on q and k, rotary (3)
    X = X + softmax(q k^T E^-1/2) v W_o;  X = X + MLP(RMS(X))                     (4)

Slot j stands at position s + j and sees all of H and the whole block. The target's head
on RMS(X) at slot k = 1..G is the law of x_{s+k}; slot 0 is dropped. The loss is

    sum_k w_k CE(slot k, x_{s+k}) / sum_k w_k,   w_k = exp(-(k - 1) / decay)      (5)

over anchors drawn anew each step from the answers, a slot counting only if its label is
an answer token (SpecForge's normalisation; the paper gives none).

Keys and values of H are cached between rounds; those of the block are thrown away, as
the anchor's own features exist only after verification. Layers and block are in
`block`, with the alternative that the paper rejects: H given to the first layer alone
(`inject="input"`).

At temperature > 0 the default still proposes each slot's likeliest token, to be
accepted with the probability that the target gives it: slots drawn independently rarely
fit together (`propose="sample"` draws them). `topology` makes a tree of the slots'
laws.

Released drafters differ from the paper, which has full attention throughout. A layer
with a window W of `windows` sees a key at p from a slot at s only if s - p < W. Such a
layer is causal inside the block, as full layers are with `is_causal=True`; with
`is_causal=False` it sees both ways, and of the block only |s - p| < W. In training the
same rule holds; trainers that leave the block unwindowed agree for W > gamma.

DFlash 2 (`dflash2`) adds convolutions around the layers and a selector of candidates
behind the head.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_tree, kv_cache
from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.drafters.block import Net, draw_anchors
from specjax.kv_cache import KVCache
from specjax.layers import Rope
from specjax.pytree import pytree
from specjax.transformer import Shared, TransformerConfig
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Bool, Float, Int, Params, PRNGKey


@pytree
class State:
    cache: KVCache  # keys and values of H, one entry per committed token


@dataclasses.dataclass(frozen=True)
class DFlash:
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="features of several layers",
        passes="1",
        trained="block layers, fusion",
        paper="Chen et al., arXiv:2602.06036",
        year=2026,
    )

    width: int  # D, the target's
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    target_layer_ids: tuple[int, ...]  # 0-based layers whose raw outputs are read
    mask_token_id: int  # an id that no text holds
    num_layers: int = 5
    gamma: int = 7  # drafted tokens per round; the paper's block size is gamma + 1
    decay: float = 4.0  # of eq. 5, tokens: 4 for gamma 7, 5 for 9, 7 for 15
    num_anchors: int = 32  # blocks per training text
    propose: Literal["argmax", "sample"] = "argmax"  # read by the engine
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    windows: tuple[int | None, ...] = ()  # keys a layer sees back; () = all, or None
    is_causal: bool | None = None  # inside the block; None: layers with a window are
    inject: Literal["every_layer", "input"] = "every_layer"  # where H is read

    def __post_init__(self):
        for name in ("gamma", "num_layers", "num_anchors"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"dflash needs {name} >= 1, got {getattr(self, name)}."
                )
        if self.decay <= 0:
            raise ValueError(f"dflash needs decay > 0, got {self.decay}.")
        if self.tree.depth > self.gamma:
            raise ValueError(
                f"dflash drafts gamma={self.gamma} tokens a block: a tree of depth "
                f"{self.tree.depth} does not fit. Prune it."
            )
        if self.propose not in ("argmax", "sample"):
            raise ValueError(
                f"dflash proposes by argmax or sample, got {self.propose!r}."
            )
        if self.inject not in ("every_layer", "input"):
            raise ValueError(
                f"dflash injects features in every_layer or the input, got "
                f"{self.inject!r}."
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers."
            )
        if min((w for w in self.windows if w is not None), default=1) < 1:
            raise ValueError(
                f"a window is >= 1 or None (all), got windows={self.windows}."
            )
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1:
            raise ValueError(
                f"target_layer_ids must ascend from -1 (the embedding) on, got {ids}."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """The target's geometry, at most 5 layers and 5 taps from layer 1 to L - 3."""
        if mask_token_id is None and "mask_token_id" not in fields:
            raise ValueError(
                "dflash needs a mask token and the target's tokenizer names none; "
                "give mask_token_id, an id that no text holds."
            )
        L = config.num_layers
        depth = min(5, max(1, L // 4))
        num_taps = min(5, max(1, L // 2))
        if num_taps == 1:
            ids = (min(L // 2, L - 2),)  # of one layer only the embedding is offered
        else:
            span = (L - 4) / (num_taps - 1)
            ids = tuple(sorted({max(0, round(1 + i * span)) for i in range(num_taps)}))
        defaults = {
            "width": config.width,
            "num_heads": config.num_heads,
            "num_kv_heads": config.plain_layer().num_kv_heads,
            "head_width": config.plain_layer().head_width,
            "mlp_width": config.mlp_width,
            "target_layer_ids": ids,
            "mask_token_id": mask_token_id,
            "num_layers": depth,
            "rope": config.rope,
            "norm_eps": config.norm_eps,
        }
        drafter = cls(**defaults | fields)
        if drafter.target_layer_ids[-1] > L - 2:
            raise ValueError(
                f"target_layer_ids {drafter.target_layer_ids} reach past layer "
                f"{L - 2} of a target with {L} layers; the last layer's raw output is "
                "not offered."
            )
        return drafter

    @property
    def tree(self) -> Tree | DynamicTree:
        return self.topology or Tree.chain(self.gamma)

    @property
    def num_slots(self) -> int:
        """N, slots of a block: the anchor's own has no token to predict."""
        return self.gamma + 1

    def near(
        self, layer: int, slots: Int[Array, "B T"], keys: Int[Array, "B S"]
    ) -> Bool[Array, "B T S"] | None:
        """Which keys the window and the causal flag leave a layer; None: all."""
        window = self.windows[layer] if self.windows else None
        causal = self.is_causal if self.is_causal is not None else window is not None
        back = slots[..., None] - keys[:, None]
        if window is None:
            return back >= 0 if causal else None
        return (back < window) & (back >= 0 if causal else back > -window)

    @property
    def taps(self) -> tuple[int, ...]:
        """The output of layer i is state i + 1."""
        return tuple(i + 1 for i in self.target_layer_ids)

    @property
    def max_positions(self) -> None:
        return None

    @property
    def net(self) -> Net:
        return Net(self)

    def apply(self, params: Params, method, *args) -> Any:
        return self.net.apply({"params": params}, *args, method=method)

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        V, D = shared.embed.shape
        if self.width != D or not 0 <= self.mask_token_id < V:
            raise ValueError(
                f"dflash has width={self.width}, mask_token_id={self.mask_token_id}; "
                f"the target has width {D} and {V} ids."
            )
        features = jnp.zeros((1, 1, len(self.target_layer_ids) * D))
        blocks = jnp.zeros((1, 1, self.num_slots, D))
        anchors = jnp.zeros((1, 1), jnp.int32)
        args = features, blocks, anchors
        return self.net.init(key, *args, method=Net.train)["params"]

    def embed_blocks(
        self, shared: Shared, anchors: Int[Array, "*B"]
    ) -> Float[Array, "*B N D"]:
        """Eq. 2."""
        masks = jnp.full((*anchors.shape, self.num_slots - 1), self.mask_token_id)
        block = jnp.concatenate([anchors[..., None], masks], axis=-1)
        return shared.embedding(block)

    def prefill(
        self, params, shared: Shared, tokens, lengths, features, cache_size
    ) -> State:
        B = tokens.shape[0]
        cache = kv_cache.init(
            self.num_layers,
            B,
            self.num_kv_heads,
            cache_size,
            self.head_width,
            shared.embed.dtype,
        )
        cache = self._write_context(params, cache, features)
        return State(cache=kv_cache.commit(cache, None, lengths))

    def draft(self, params, shared: Shared, state: State, anchor, sampling, keys):
        x, state = self.fill(params, shared, state, anchor)
        logits = shared.logits(x[:, 1 : self.tree.depth + 1])
        return draft_tree.from_laws(self.tree, logits, sampling, keys), state

    def fill(
        self, params: Params, shared: Shared, state: State, anchor: Int[Array, "B"]
    ) -> tuple[Float[Array, "B N D"], State]:
        """The one pass of a round: the slots of the block at each row's anchor."""
        cache, N = state.cache, self.num_slots
        start = cache.length
        positions = start[:, None] + jnp.arange(N, dtype=jnp.int32)[None]
        mask = jnp.arange(cache.size)[None, None] < (start + N)[:, None, None]
        x, joined = self.apply(
            params,
            Net.__call__,
            self.embed_blocks(shared, anchor),
            positions,
            _writes(cache),
            jnp.broadcast_to(mask, (*positions.shape, cache.size)),
            jnp.broadcast_to(jnp.arange(cache.size), (mask.shape[0], cache.size)),
        )
        k, v = zip(*joined, strict=True)
        # The block's entries stay past `length`, where nothing sees them.
        return x, State(KVCache(k, v, start))

    def commit(self, params, shared, state: State, verdict, tokens, features) -> State:
        del shared, tokens
        cache = self._write_context(params, state.cache, features)
        return State(cache=kv_cache.commit(cache, None, verdict.num_committed))

    def _write_context(self, params, cache: KVCache, features) -> KVCache:
        """Writes H of the tokens that follow the cache's length, not yet committed."""
        (B, T), S = features.shape[:2], cache.size
        positions = cache.length[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        places = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        args = features, positions, _writes(cache), places
        k, v = zip(*self.apply(params, Net.context, *args), strict=True)
        return KVCache(k, v, cache.length)

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 5 over the batch's anchors."""
        x, at, wanted = self.blocks(params, shared, batch, key)
        rows = jnp.arange(x.shape[0])[:, None, None]
        V, x = shared.embed.shape[0], x[:, :, 1:]
        weights = jnp.where(wanted, self.slot_weights[None, None], 0.0)
        ce = base.label_losses(shared.logits, V, x, batch.tokens[rows, at])

        by_slot = jax.vmap(base.masked_mean, in_axes=(2, 2))
        logs = {"ce": by_slot(ce, wanted)}
        law = lambda some: shared.logits(x[:, some])
        logs |= self.judge(shared, batch, law, at, wanted)
        return base.masked_mean(ce, weights), logs

    def judge(self, shared: Shared, batch: Batch, law, at, wanted) -> dict:
        """What to log of blocks with labels at `at`; `law` of some [B A G V]."""
        # p of x_{s+k} is read from the state at s + k - 1. Anchors ascend, so those
        # that are judged are spread over the text.
        A, rows = at.shape[1], jnp.arange(at.shape[0])[:, None, None]
        some = np.linspace(0, A - 1, max(1, A // base.THIN)).round().astype(int)
        target = shared.logits(batch.hidden[rows, at[:, some] - 1])
        accepted = self._acceptance(law(some), target)
        return base.acceptance(accepted, wanted[:, some])

    @property
    def slot_weights(self) -> Float[Array, "G"]:
        """w_k of eq. 5."""
        return jnp.exp(-jnp.arange(self.gamma, dtype=jnp.float32) / self.decay)

    def blocks(
        self, params: Params, shared: Shared, batch: Batch, key: PRNGKey
    ) -> tuple[Float[Array, "B A N D"], Int[Array, "B A G"], Bool[Array, "B A G"]]:
        """Slots of blocks at anchors drawn anew, where their labels stand, which count.

        The label of the k-th prediction is the token k places behind the anchor.
        """
        anchors, real = draw_anchors(key, batch.mask, self.num_anchors)
        B, T = batch.tokens.shape
        rows = jnp.arange(B)[:, None]
        masked = self.embed_blocks(shared, batch.tokens[rows, anchors])
        x = self.apply(params, Net.train, batch.features, masked, anchors)
        where = anchors[..., None] + jnp.arange(1, self.gamma + 1)[None, None]
        at = jnp.minimum(where, T - 1)
        wanted = batch.mask[rows[..., None], at] & (where < T) & real[..., None]
        return x, at, wanted

    def _acceptance(self, logits, target):
        """Acceptance of a proposal: p at the argmax, or 1 - TV if it is drawn."""
        if self.propose == "sample":
            return base.overlap(logits, target)
        p = jax.nn.softmax(target, axis=-1)
        best = jnp.argmax(logits, axis=-1)[..., None]
        return jnp.take_along_axis(p, best, axis=-1)[..., 0]


def _writes(cache: KVCache) -> list:
    """What puts a layer's keys and values behind those that are cached."""
    return [
        lambda k, v, old_k=old_k, old_v=old_v: (
            kv_cache.write(old_k, k, cache.length),
            kv_cache.write(old_v, v, cache.length),
        )
        for old_k, old_v in zip(cache.k, cache.v, strict=True)
    ]
