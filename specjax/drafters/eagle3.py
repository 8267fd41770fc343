"""EAGLE-3: several states of the target are fused; training unrolls the drafts.

Li et al. 2025, arXiv:2503.01840, section 3; reference code SafeAILab/EAGLE cb7e084.
With F_t three states of the target at position t side by side, low, middle and high,
none of them normed, and e(.) the target's embedding:

    g_t = W_fc F_t                                                     (1)
    u_t = [RMS(e(x_{t+1})); RMS(g_t)]          twice the width         (2)
    y_t = g_t + Attn(u)_t                                              (3)
    a_t = y_t + MLP(RMS(y_t))                                          (4)
    q   = softmax(U RMS(a_t))                  law of x_{t+2}          (5)

Pairs, positions and what is fed again are those of EAGLE-1. A drafted pair has a_t, as
it is before the norm of eq. 5, in place of g: W_fc is for target states only. U has a
row for each of `draft_ids`, a vocabulary that may be smaller than the target's.

No feature is regressed, so nothing makes a_t a thing that the drafter can read. Hence
training-time test: pass i = 0, 1, .. of row t reads (a_t of pass i - 1, x_{t+1+i}) at
position t + i, sees the text's own pairs up to t and the row's pairs of passes 1 to i,

    loss = sum_i decay^i mean_t CE(p_{t+2+i}, q_t of pass i)           (6)

with p the target's law over the draft vocabulary, renormalised. A row counts where the
target's likeliest token is in that vocabulary.

Where paper and code differ the code is followed: 7 passes, not 5, and states that enter
layers 2, L/2 and L - 3, numbered as `Transformer` does. The switches of the 3.1 weights
are fields. Departs from the code: the mean is over the rows that count (it divides by
all, padding included); rows whose next tokens are not to be learned do not count (it
takes zeros past the end for a text); U starts as the target's head and the rest as
normal noise of deviation 0.02, not as torch's linear layers do; the layer's positions
are scaled as the target's, not by a base of 10,000.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_vocab
from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.drafters.recurrent import Recurrent, check, check_target
from specjax.layers import GatedMLP, RMSNorm, dense, of_layers
from specjax.transformer import Attention, Shared, TransformerConfig, locate
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Float, Params, PRNGKey


class Layer(nn.Module):
    """Eq. 2 to 4."""

    config: TransformerConfig
    norm_before_residual: bool

    @nn.compact
    def __call__(
        self, e: Float[Array, "B T D"], g: Float[Array, "B T D"], block, slots
    ):
        c = self.config
        normed = RMSNorm(c.norm_eps, name="hidden_norm")(g)
        e = RMSNorm(c.norm_eps, name="input_norm")(e.astype(g.dtype))
        u = jnp.concatenate([e, normed], axis=-1)
        attended, slots = Attention(c, name="attention")(u, block, slots)
        y = (normed if self.norm_before_residual else g) + attended
        m = RMSNorm(c.norm_eps, name="post_norm")(y)
        return y + GatedMLP(c.mlp_width, c.mlp_bias, name="mlp")(m), slots


class Net(nn.Module):
    """Eq. 1 to 5 but for U. Parameters: `fc`, `layer`, `norm`, and norms before fc."""

    drafter: "Eagle3"

    def setup(self):
        d, c = self.drafter, self.drafter.config
        M = len(d.target_states)
        self.fc = self.param("fc", nn.initializers.normal(0.02), (c.width, M * c.width))
        self.layer = of_layers(Layer)(c, d.norm_before_residual)
        self.norm = RMSNorm(c.norm_eps)
        if d.norm_before_fc:
            self.fused_norm = RMSNorm(c.norm_eps)
        if d.fc_norm:
            self.fc_norm = [RMSNorm(c.norm_eps) for _ in range(M)]

    def fuse(self, features: Float[Array, "B T MD"]) -> Float[Array, "B T D"]:
        if self.drafter.norm_before_fc:
            features = self.fused_norm(features)
        if self.drafter.fc_norm:
            states = jnp.split(features, len(self.fc_norm), axis=-1)
            states = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
            features = jnp.concatenate(states, axis=-1)
        return dense(features, self.fc)

    def __call__(self, e, g, block, slots):
        a, slots = self.layer(e, g, block, slots)
        return (self.norm(a) if self.drafter.norm_output else a), slots

    def read(self, a: Float[Array, "B *T D"]) -> Float[Array, "B *T D"]:
        """What U reads of an output of `__call__`."""
        return a if self.drafter.norm_output else self.norm(a)

    def everything(self, features, block):
        g = self.fuse(features)
        return self.read(self(g, g, block, None)[0])


@dataclasses.dataclass(frozen=True)
class Eagle3(Recurrent):
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="features of several layers, tokens",
        passes="gamma",
        trained="one layer, fusion, head",
        paper="Li et al., arXiv:2503.01840",
        year=2025,
    )

    config: TransformerConfig  # of the layer; its width is the target's
    target_states: tuple[int, ...]  # i: the state that enters the target's layer i
    gamma: int = 5  # drafted tokens per round
    ttt_steps: int = 7  # passes of eq. 6
    decay: float = 0.8  # of eq. 6
    draft_ids: tuple[int, ...] = ()  # target id of each draft token; none: all ids
    share_head: bool = False  # True: U is the target's head, of draft_ids alone
    norm_before_residual: bool = False  # 3.1: eq. 3 adds to RMS(g_t)
    norm_before_fc: bool = False  # 3.1: one norm of F_t
    fc_norm: bool = False  # 3.1: a norm of each state of F_t
    norm_output: bool = False  # 3.1: RMS(a_t) is fed back, not a_t
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        check(self)
        if self.ttt_steps < 1:
            raise ValueError(f"eagle3 needs ttt_steps >= 1, got {self.ttt_steps}.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"eagle3 needs 0 < decay <= 1, got {self.decay}.")
        check_states(self)
        draft_vocab.check(np.array(self.draft_ids), self.config.vocab_size)

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """One layer of the target's shape; states as published, spread if too few."""
        del mask_token_id
        L = config.num_layers
        if L >= 7:
            states = (2, L // 2, L - 3)
        else:
            states = tuple(sorted({L // 4, L // 2, L - 1}))
        layer = dataclasses.replace(config.plain_layer(), qkv_bias=False)
        defaults = {"config": layer, "target_states": states}
        drafter = cls(**defaults | fields)
        if drafter.target_states[-1] >= L:
            raise ValueError(
                f"target_states {drafter.target_states} reach past layer {L - 1}, the "
                f"last of the target; state {L} is normed and not offered. Files that "
                "count outputs of layers have each number one lower."
            )
        return drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return self.target_states

    @property
    def ids(self) -> np.ndarray:
        """Target ids of U's rows."""
        return np.array(self.draft_ids or range(self.config.vocab_size), np.int32)

    def apply(self, params: Params, method, *args) -> Any:
        net = {k: v for k, v in params.items() if k != "head"}
        return Net(self).apply({"params": net}, *args, method=method)

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        check_target(self, shared)
        features = jnp.zeros((1, 1, len(self.target_states) * self.config.width))
        block = locate(self.config, (1, 1), None, None, None)
        variables = Net(self).init(key, features, block, method=Net.everything)
        params: Params = variables["params"]
        if self.share_head:
            return params
        head = shared.head[self.ids].astype(params["fc"].dtype)
        return {**params, "head": head}

    def fuse(self, params, features):
        """Eq. 1."""
        return self.apply(params, Net.fuse, features)

    def step(self, params, e, g, block, slots) -> Any:
        return self.apply(params, Net.__call__, e, g, block, slots)

    def draft_logits(self, params, shared: Shared, y: Float[Array, "B *T D"]):
        """Eq. 5 before the softmax, by draft token [B *T R]."""
        if self.share_head:
            head = shared.head[self.ids] if self.draft_ids else shared.head
        else:
            head = params["head"]
        return dense(self.apply(params, Net.read, y), head, jnp.float32)

    def logits(self, params, shared: Shared, y):
        """Eq. 5 before the softmax, by target id."""
        logits = self.draft_logits(params, shared, y)
        if not self.draft_ids:
            return logits
        return draft_vocab.spread(logits, self.ids, self.config.vocab_size)

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 6; a row counts while the tokens and states it needs are to be learned.

        "alpha" comes from the same passes: pass k - 1 is the draft of token k, with the
        text's tokens before it.
        """
        del key
        outputs = self.unroll(
            params,
            shared,
            batch.tokens,
            self.fuse(params, batch.features),
            every=1,
            steps=max(self.ttt_steps, self.tree.depth),
        )
        counted = batch.mask & base.shift(batch.mask, -1)

        def values(late, hidden, counted):
            z = shared.logits(hidden)
            if self.draft_ids:
                within = np.isin(np.arange(self.config.vocab_size), self.ids)
                counted &= jnp.asarray(within)[jnp.argmax(z, axis=-1)]
                z = z[..., self.ids]
            p = jax.nn.softmax(z, axis=-1)
            laws = (self.draft_logits(params, shared, a) for a in late)
            return [base.soft_cross_entropy(q, p) for q in laws], counted

        scores = self.config.vocab_size + self.ttt_steps * len(self.ids)
        args = base.late(outputs[: self.ttt_steps]), batch.hidden, counted
        ce = base.late_means(*base.few_places(values, scores, *args))
        weights = self.decay ** jnp.arange(self.ttt_steps, dtype=jnp.float32)
        frozen, outputs = jax.lax.stop_gradient((params, outputs))
        thin = [a[:, :: base.THIN] for a in outputs]
        logs = self.acceptance(frozen, shared, batch, thin)
        return jnp.sum(weights * ce), {"ce": ce} | logs


def check_states(drafter: Any) -> None:
    """Refuses states and norms of them that there cannot be."""
    if drafter.norm_before_fc and drafter.fc_norm:
        raise ValueError(
            "norm_before_fc norms all states as one, fc_norm each: choose one."
        )
    states = drafter.target_states
    if not states or list(states) != sorted(set(states)) or states[0] < 0:
        raise ValueError(f"target_states must ascend from 0 on, got {states}.")
