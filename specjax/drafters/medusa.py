"""Medusa-1: G extra heads on the target's last state, drafted in one pass.

Cai et al. 2024, arXiv:2401.10774, sections 2.1 and 2.2. Head k = 1..G reads f_t, the
state from which the target's own head predicts x_{t+1}, and guesses x_{t+1+k}:

    z_k = f_t + SiLU(W_k f_t + b_k)                   (1)
    q_k = softmax(U_k z_k)                            (2)
    loss = sum_k decay^k CE(q_k, x_{t+1+k})           (3)

W_k starts at zero and U_k as the target's head, so a head starts as the target's head
but for b_k, which the reference code (FasterDecoding/Medusa e2a5d20) draws as a torch
linear layer does, U(-D^-1/2, D^-1/2).

The heads draft a chain, or the tree that `topology` names: of each head's likeliest
guesses under greedy settings (the paper's tree), else of guesses drawn without
replacement. Departs from the paper: verification is exact, where its typical acceptance
changes the target's law; that is the rule `lossy_typical`.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import draft_tree
from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.layers import dense
from specjax.pytree import pytree
from specjax.transformer import Shared, TransformerConfig
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Float, Params, PRNGKey


@pytree
class State:
    feature: Float[Array, "B D"]  # f_t: the state the anchor was sampled from


class Heads(nn.Module):
    """Eq. 1 and 2 before the softmax, all heads at once or `apart`."""

    num_heads: int
    gamma: int
    share_head: bool

    @nn.compact
    def __call__(
        self, f: Float[Array, "*B D"], head: Float[Array, "V D"], apart: bool = False
    ) -> Float[Array, "*B G V"] | list[Float[Array, "*B V"]]:
        G, M, (V, D) = self.gamma, self.num_heads, head.shape

        def uniform(key, shape, dtype=jnp.float32):
            return jax.random.uniform(key, shape, dtype, -(D**-0.5), D**-0.5)

        def copied(key, shape):
            del key
            return jnp.broadcast_to(head, shape)

        w = self.param("w", nn.initializers.zeros, (M, D, D))[:G]
        b = self.param("b", uniform, (M, D))[:G]
        x = jnp.einsum("...D,GED->...GE", f, w)
        z = f[..., None, :] + jax.nn.silu(x + jnp.broadcast_to(b, x.shape))
        u = None if self.share_head else self.param("u", copied, (M, V, D))[:G]
        if apart:
            own = lambda k: head if u is None else u[k]
            return [dense(z[..., k, :], own(k), jnp.float32) for k in range(G)]
        if u is None:
            return dense(z, head, jnp.float32)
        return jnp.einsum("...GD,GVD->...GV", z, u, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Medusa:
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="last feature",
        passes="1",
        trained="heads",
        paper="Cai et al., arXiv:2401.10774",
        year=2024,
    )

    gamma: int = 4  # drafted tokens per round, at most num_heads
    num_heads: int = 4
    decay: float = 0.8  # head k weighs decay^k in the loss
    share_head: bool = False  # True: no U_k, every head ends in the target's own head
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        if self.gamma < 1:
            raise ValueError(f"medusa needs gamma >= 1, got {self.gamma}.")
        if self.gamma > self.num_heads:
            raise ValueError(
                f"medusa drafts one token a head: gamma={self.gamma} exceeds "
                f"num_heads={self.num_heads}. Train more heads."
            )
        if self.tree.depth > self.num_heads:
            raise ValueError(
                f"medusa has one head a depth: a tree of depth {self.tree.depth} "
                f"exceeds num_heads={self.num_heads}. Prune it or train more heads."
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"medusa needs 0 < decay <= 1, got {self.decay}.")

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
    def max_positions(self) -> None:
        return None

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        f = jnp.zeros((1, shared.head.shape[1]), shared.head.dtype)
        return self._heads(self.gamma).init(key, f, shared.head)["params"]

    def _heads(self, gamma: int) -> Heads:
        return Heads(self.num_heads, gamma, self.share_head)

    def logits(
        self,
        params: Params,
        shared: Shared,
        f: Float[Array, "*B D"],
        gamma: int,
        apart: bool = False,
    ) -> Any:
        """Laws of the first gamma heads, before the softmax; see `Heads`."""
        heads = self._heads(gamma)
        return heads.apply({"params": params}, f, shared.head, apart)

    def prefill(self, params, shared, tokens, lengths, features, cache_size) -> State:
        del params, shared, tokens, cache_size
        rows = jnp.arange(features.shape[0])
        return State(feature=features[rows, lengths - 1])

    def draft(self, params, shared, state, anchor, sampling, keys):
        del anchor  # The heads never look at the anchor token.
        logits = self.logits(params, shared, state.feature, self.tree.depth)
        return draft_tree.from_laws(self.tree, logits, sampling, keys), state

    def commit(self, params, shared, state, verdict, tokens, features) -> State:
        del params, shared, state, tokens
        rows = jnp.arange(features.shape[0])
        return State(feature=features[rows, verdict.num_accepted])

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 3, each head averaged over the positions whose label is to be learned."""
        del key
        logits = lambda f: self.logits(params, shared, f, self.num_heads, apart=True)
        args = logits, batch.features, shared, batch, self.tree.depth
        ces, logs = base.head_losses(*args)
        k = jnp.arange(1, self.num_heads + 1, dtype=jnp.float32)
        return jnp.sum(self.decay**k * ces), {"ce": ces} | logs
