"""Blockwise parallel decoding: one feed-forward block turns a state into k predictions.

Stern, Shazeer, Uszkoreit 2018, arXiv:1811.03115, sections 3 to 6. From f_t, the state
that the target's head reads, the sub-models p_1..p_k guess x_{t+1}..x_{t+k}:

    [y_1 .. y_k] = W_2 relu(W_1 f_t + b_1) + b_2,    W_1 [kF D], W_2 [kD kF]      (1)
    p_j = softmax(U (f_t + y_j)),    U the target's own head                      (2)
    loss = CE(p_j, x_{t+j}),    j drawn anew for each batch                       (3)

p_1 verifies what the others propose; the pass that verifies a block gives the next one
(the paper's merged form), so a round is one pass of the target and eq. 1 once.

The paper keeps the target frozen or trains it with the heads; `tune_target` does the
second (`joint.py`), on the target's own answers if that wrote the data. There is no
public reference code.

Departs from the paper: p_1 is the target's own head (y_1 = 0), in the paper it has a
slice of the block as well, so that even a frozen model's output varies with k. So
gamma = k - 1 slices are made. W_2 starts at zero, so that all heads start as the
target's; the paper's block starts at random. With `tune_target` the loss of p_1 is in
every batch beside the drawn one, and adapter and rates are those of Medusa-2. The paper
accepts what equals the argmax, or is near it; here the rules are exact, at every
temperature.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import draft_tree
from specjax.drafters import base
from specjax.drafters.base import Batch, Card, Joint
from specjax.layers import dense
from specjax.pytree import pytree
from specjax.transformer import Shared, TransformerConfig
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Float, Params, PRNGKey


@pytree
class State:
    feature: Float[Array, "B D"]  # f_t: the state the anchor was sampled from


class Slices(nn.Module):
    """Eq. 1 with the residual of eq. 2: f_t + y_j for j = 2..k."""

    num_slices: int
    hidden_width: int

    @nn.compact
    def __call__(self, f: Float[Array, "*B D"]) -> Float[Array, "*B G D"]:
        G, F, D = self.num_slices, self.hidden_width, f.shape[-1]
        normal, zeros = nn.initializers.lecun_normal(1, 0), nn.initializers.zeros
        wide = lambda b, x: jnp.broadcast_to(b, x.shape)
        x = dense(f, self.param("w1", normal, (G * F, D)))
        x = jax.nn.relu(x + wide(self.param("b1", zeros, (G * F,)), x))
        y = dense(x, self.param("w2", zeros, (G * D, G * F)))
        y = y + wide(self.param("b2", zeros, (G * D,)), y)
        return f[..., None, :] + y.reshape(*f.shape[:-1], G, D)


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="last feature",
        passes="1",
        trained="one feed-forward block",
        paper="Stern et al., arXiv:1811.03115",
        year=2018,
    )

    hidden_width: int  # F
    gamma: int = 4  # drafted tokens per round, at most num_slices
    num_slices: int = 4  # k - 1
    one_loss: bool = True  # eq. 3; False: the mean over all j, as it is on average
    tune_target: bool = False  # train the target too
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        for field in ("gamma", "hidden_width"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"blockwise needs {field} >= 1, got {getattr(self, field)}."
                )
        if max(self.gamma, self.tree.depth) > self.num_slices:
            raise ValueError(
                f"blockwise guesses num_slices={self.num_slices} tokens ahead; a "
                f"draft of {max(self.gamma, self.tree.depth)} is too deep. Train more."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """The target's MLP width; as many slices as tokens are drafted."""
        del mask_token_id
        if "gamma" in fields:
            fields = {"num_slices": fields["gamma"]} | fields
        values: dict[str, Any] = {"hidden_width": config.mlp_width}
        return cls(**values | fields)

    @property
    def tree(self) -> Tree | DynamicTree:
        return self.topology or Tree.chain(self.gamma)

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,)

    @property
    def max_positions(self) -> None:
        return None

    @property
    def joint(self) -> Joint | None:
        return Joint(head_weight=1.0) if self.tune_target else None

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        f = jnp.zeros((1, shared.head.shape[1]), shared.head.dtype)
        return self._slices.init(key, f)["params"]

    @property
    def _slices(self) -> Slices:
        return Slices(self.num_slices, self.hidden_width)

    def states(self, params: Params, f: Float[Array, "*B D"]) -> Array:
        """f_t + y_j for j = 2..k, [*B G D]."""
        states = self._slices.apply({"params": params}, f)
        return states  # pyright: ignore[reportReturnType]

    def prefill(self, params, shared, tokens, lengths, features, cache_size) -> State:
        del params, shared, tokens, cache_size
        rows = jnp.arange(features.shape[0])
        return State(feature=features[rows, lengths - 1])

    def draft(self, params, shared, state, anchor, sampling, keys):
        del anchor  # Nothing that is guessed depends on another guess.
        z = self.states(params, state.feature)[:, : self.tree.depth]
        logits = shared.logits(z)
        return draft_tree.from_laws(self.tree, logits, sampling, keys), state

    def commit(self, params, shared, state, verdict, tokens, features) -> State:
        del params, shared, state, tokens
        rows = jnp.arange(features.shape[0])
        return State(feature=features[rows, verdict.num_accepted])

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 3, averaged over the tokens to learn."""
        z = self.states(params, batch.features)
        logits = lambda z: [shared.logits(z[:, :, j]) for j in range(self.num_slices)]
        ces, logs = base.head_losses(logits, z, shared, batch, self.tree.depth)
        if not self.one_loss:
            return jnp.mean(ces), {"ce": ces} | logs
        g = jax.random.randint(key, (), 0, self.num_slices)
        later = lambda x: jax.lax.dynamic_slice_in_dim(
            jnp.pad(x, ((0, 0), (0, self.num_slices + 1))), 2 + g, x.shape[1], axis=1
        )
        label, wanted = later(batch.tokens), later(batch.mask)
        one = jax.lax.dynamic_index_in_dim(z, g, 2, keepdims=False)
        V = shared.embed.shape[0]
        ce = base.label_losses(shared.logits, V, one, label)
        return base.masked_mean(ce, wanted), {"ce": ces} | logs
