"""DSpark: DFlash's block, corrected left to right by a small sequential head.

arXiv:2607.05147, sections 3.1 and 3.2; reference code deepseek-ai/DeepSpec afdfa7c. The
backbone is that of `dflash`, but its anchor's slot predicts too: G slots [anchor, mask,
..., mask] at positions s .. s + G - 1 give states h_0 .. h_{G-1}, and slot k drafts
x_{s+k+1}. With U_k the target's head on h_k, w = W1[x_{s+k}] a row of r numbers for the
token before, which is the anchor or was drafted, and s_k a state that starts as 0,

    law of x_{s+k+1} = softmax(U_k + W2 c_k)                                      (1)
    c_k = w                                                        "vanilla"      (2)
    c_k = sigmoid(G [h_k; w] + b) * w                              "gated"        (3)
    [g; u; o] = J [s_k; w; h_k] + b,  c_k = tanh(o),
    s_{k+1} = sigmoid(g) * s_k + (1 - sigmoid(g)) * tanh(u)        "rnn"          (4)
    confidence_k = sigmoid(a [h_k; w] + b)                                        (5)

The confidence is that draft k is accepted if all before it were. It reads what was
drafted before k but not draft k itself, so a draft may be stopped by it (`scheduler`).

The text's own tokens stand for the drafted ones in training. Over blocks at anchors
drawn anew, with p the target's law, q that of eq. 1 and a*_k = 1 - |q - p|_1 / 2,

    sum_k w_k (w_ce CE_k + w_l1 |q - p|_1 + w_conf BCE(confidence_k, a*_k)) / sum_k w_k
    w_k = exp(-k / decay)                                                         (6)

A label counts if it and all before it in its block are answer tokens; no gradient runs
into a*. Eq. 1 is the law that the verifier is given. `topology` makes trees: eq. 2 to 5
know a node by its token and, eq. 4, its parent's state, so every tree is drafted from
the one pass of the block.

Where paper and code differ, this is the code of the public weights: the biases of eq. 4
and 5, the gated head, the decay of 4 at 7 slots (the paper divides by the block size),
the sum of |q - p| without a half. Departs from it: sum_k w_k has no 1e-6 added.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_tree, sharding
from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.drafters.dflash import DFlash, State
from specjax.layers import dense
from specjax.transformer import Shared, TransformerConfig
from specjax.tree import DynamicTree
from specjax.typing import Array, Float, Int, Params, PRNGKey
from specjax.verify import Draft


class SequentialHead(nn.Module):
    """Eq. 2 to 5."""

    kind: str
    rank: int
    width: int
    vocab_size: int

    def setup(self):
        normal, zeros = nn.initializers.normal(0.02), nn.initializers.zeros
        V, r, D = self.vocab_size, self.rank, self.width
        self.w1 = self.param("w1", normal, (V, r))
        self.w2 = self.param("w2", normal, (V, r))
        if self.kind == "gated":
            self.gate = self.param("gate", normal, (r, D + r))
            self.gate_bias = self.param("gate_bias", zeros, (r,))
        if self.kind == "rnn":
            self.joint = self.param("joint", normal, (3, r, 2 * r + D))
            self.joint_bias = self.param("joint_bias", zeros, (3, r))
        self.sure = self.param("confidence", normal, (D + r,))
        self.sure_bias = self.param("confidence_bias", zeros, (1,))

    def code(
        self, state: Float[Array, "*B R"], before: Int[Array, "*B"], h: Array
    ) -> tuple[Float[Array, "*B R"], Float[Array, "*B R"]]:
        """The next state and c_k."""
        w = sharding.look_up(self.w1, before)
        if self.kind == "vanilla":
            return state, w
        if self.kind == "gated":
            z = dense(jnp.concatenate([h, w], axis=-1), self.gate)
            return state, jax.nn.sigmoid(_plus(z, self.gate_bias)) * w
        z = dense(jnp.concatenate([state, w, h], axis=-1), self.joint)
        g, u, o = jnp.moveaxis(_plus(z, self.joint_bias), -2, 0)
        g = jax.nn.sigmoid(g)
        return g * state + (1 - g) * jnp.tanh(u), jnp.tanh(o)

    def correction(self, code: Float[Array, "*B R"]) -> Float[Array, "*B V"]:
        return dense(code, self.w2, jnp.float32)

    def step(self, state, before, h):
        """The next state and the correction of a slot."""
        state, code = self.code(state, before, h)
        return state, self.correction(code)

    def confidence(self, before: Int[Array, "*B"], h: Array) -> Float[Array, "*B"]:
        """Eq. 5 before the sigmoid."""
        w = sharding.look_up(self.w1, before)
        z = dense(jnp.concatenate([h, w], axis=-1), self.sure[None])
        return _plus(z, self.sure_bias)[..., 0].astype(jnp.float32)

    def train(self, before: Int[Array, "*B G"], h: Float[Array, "*B G D"]):
        """Corrections [*B G V] and confidences [*B G] after the text's own tokens."""
        dtype = jnp.result_type(h.dtype, self.w1.dtype)
        zeros = jnp.zeros((*before.shape, self.rank), dtype)
        if self.kind == "rnn":
            step = lambda state, xs: self.code(state, *xs)
            xs = jnp.moveaxis(before, -1, 0), jnp.moveaxis(h, -2, 0)
            codes = jnp.moveaxis(jax.lax.scan(step, zeros[..., 0, :], xs)[1], 0, -2)
        else:  # nothing reads the state
            _, codes = self.code(zeros, before, h)
        return self.correction(codes), self.confidence(before, h)


def _plus(x: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    return x + jnp.broadcast_to(bias, x.shape)


@dataclasses.dataclass(frozen=True)
class DSpark(DFlash):
    """Hyperparameters beside those of `DFlash`."""

    card: ClassVar[Card] = Card(
        reads="features of several layers, drafted tokens",
        passes="1, and gamma of a small head",
        trained="block layers, fusion, small head",
        paper="arXiv:2607.05147",
        year=2026,
    )

    propose: Literal["argmax", "sample"] = "sample"
    head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    rank: int = 256  # r
    w_ce: float = 0.1
    w_l1: float = 0.9
    w_conf: float = 1.0
    # Of each slot: divides eq. 5 before the sigmoid (`calibration` fits it); the last
    # one is also that of later slots. None: 1.
    temperatures: tuple[float, ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.head not in ("vanilla", "gated", "rnn"):
            raise ValueError(
                f"dspark's head is vanilla, gated or rnn, got {self.head!r}."
            )
        if self.rank < 1:
            raise ValueError(f"dspark needs rank >= 1, got {self.rank}.")
        weights = self.w_ce, self.w_l1, self.w_conf
        if min(weights) < 0 or self.w_ce + self.w_l1 == 0:
            raise ValueError(
                "dspark needs w_ce, w_l1, w_conf >= 0, and one of the first two above "
                f"0; got {weights}."
            )
        T = self.temperatures
        if T is not None and (not T or min(T) <= 0):
            raise ValueError(
                f"dspark's temperatures are > 0, one a slot from the first on, got "
                f"{T}. Fit them with specjax.calibration, or leave them out."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """DFlash's shape; the paper's rank for vocabularies of 8,192 ids and more."""
        rank = min(256, max(4, config.vocab_size // 32))
        return super().for_target(config, mask_token_id, **{"rank": rank} | fields)

    @property
    def num_slots(self) -> int:
        """The anchor's slot predicts the first token."""
        return self.gamma

    def sequential(self, params: Params, shared: Shared, method: Any, *args) -> Any:
        """A method of the head, with its weights."""
        return self._head(shared).apply(
            {"params": params["sequential"]}, *args, method=method
        )

    def _head(self, shared: Shared) -> SequentialHead:
        V, D = shared.embed.shape
        return SequentialHead(self.head, self.rank, D, V)

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        backbone_key, head_key = jax.random.split(key)
        before = jnp.zeros((1, 1), jnp.int32)
        h = jnp.zeros((1, 1, shared.embed.shape[1]))
        head = self._head(shared).init(head_key, before, h, method=SequentialHead.train)
        return super().init(backbone_key, shared) | {"sequential": head["params"]}

    def draft(self, params, shared: Shared, state: State, anchor, sampling, keys):
        h, state = self.fill(params, shared, state, anchor)
        tree, B = self.tree, anchor.shape[0]
        U = shared.logits(h[:, : tree.depth])
        zero = jnp.zeros((B, self.rank), h.dtype)
        s, first = self.sequential(
            params, shared, SequentialHead.step, zero, anchor, h[:, 0]
        )

        def step(carry, tokens, s, sees, level):
            del sees
            here = jnp.repeat(h[:, level + 1][:, None], tokens.shape[1], axis=1)
            s, correction = self.sequential(
                params, shared, SequentialHead.step, s, tokens, here
            )
            return U[:, level + 1][:, None] + correction, s, carry

        first = U[:, 0] + first
        draft, _ = draft_tree.grow_from(tree, first, s, step, None, sampling, keys)
        return self._with_confidence(params, shared, draft, anchor, h), state

    def _with_confidence(self, params, shared, draft: Draft, anchor, h) -> Draft:
        """Eq. 5 for the children of each inner node; a dynamic tree has none."""
        tree = self.tree
        if isinstance(tree, DynamicTree):
            return draft
        nodes = jnp.concatenate([anchor[:, None], draft.tokens], axis=1)
        before, depths = nodes[:, tree.inner], tree.depths[tree.inner]
        z = self.sequential(
            params,
            shared,
            SequentialHead.confidence,
            jnp.maximum(before, 0),
            h[:, depths],
        )
        if self.temperatures is not None:
            last = len(self.temperatures) - 1
            T = np.array(self.temperatures)[np.minimum(depths, last)]
            z = z / jnp.asarray(T, z.dtype)[None]
        return dataclasses.replace(draft, confidence=jax.nn.sigmoid(z))

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 6 over the batch's anchors."""
        h, at, wanted = self.blocks(params, shared, batch, key)
        wanted = jnp.cumprod(wanted, axis=-1) > 0
        rows = jnp.arange(h.shape[0])[:, None, None]

        def values(h, before, hidden, labels):
            train = SequentialHead.train
            correction, z = self.sequential(params, shared, train, before, h)
            logits = shared.logits(h) + correction  # [B A G V]
            p = jax.nn.softmax(shared.logits(hidden), axis=-1)
            l1 = jnp.sum(jnp.abs(jax.nn.softmax(logits, axis=-1) - p), axis=-1)
            return base.cross_entropy(logits, labels), l1, z

        # p of a label is read from the state one place before it.
        text, scores = batch.tokens, self.gamma * shared.embed.shape[0]
        args = text[rows, at - 1], batch.hidden[rows, at - 1], text[rows, at]
        ce, l1, z = base.few_places(values, scores, h, *args)
        accepted = jax.lax.stop_gradient(jnp.clip(1 - l1 / 2, 0, 1))
        bce = jax.nn.softplus(z) - accepted * z

        weights = jnp.where(wanted, self.slot_weights[None, None], 0.0)
        mean = lambda x: base.masked_mean(x, weights)
        total = self.w_ce * mean(ce) + self.w_l1 * mean(l1) + self.w_conf * mean(bce)
        sure, means = jax.nn.sigmoid(z), {"ce": ce, "l1": l1, "bce": bce}
        logs = {name: mean(x) for name, x in means.items()} | {
            "confidence_error": mean(jnp.abs(sure - accepted)),
            "confidence_bias": mean(sure - accepted),
            "confidence_prefix_bias": mean(
                jnp.cumprod(sure, axis=-1) - jnp.cumprod(accepted, axis=-1)
            ),
        }
        return total, logs | base.acceptance(accepted, wanted)
