"""EAGLE-1: a decoder layer predicts the target's next feature from feature and token.

Li et al. 2024, arXiv:2401.15077, section 3; reference code SafeAILab/EAGLE, branch v1
(4a9cf3a). With f_t the state from which the target's own head predicts x_{t+1}, after
the final norm, and e(.) the target's embedding, the pair (f_t, x_{t+1}) at position t
says which token was really drawn from f_t, and gives

    u_t = W_fc [e(x_{t+1}); f_t] + b_fc                                (1)
    a_t = u_t + Attn(u)_t            no norm before attention          (2)
    y_t = a_t + MLP(RMS(a_t))        no norm after it; guesses f_{t+1}  (3)
    q   = softmax(U y_t)             the target's head: law of x_{t+2}  (4)

and the next pass reads (y_t, d) at position t + 1 for a token d drafted from q. Trained
on true features with noise, one step ahead:

    loss = w_feature SmoothL1(y_t, f_{t+1}) + w_token CE(p_{t+2}, q)    (5)

Example: of the prompt A B C D the target makes f_0 .. f_3 and draws E. The pairs are
(f_0, B) (f_1, C) (f_2, D) (f_3, E), and the output of the last is the law after E.
How it drafts and keeps its state is in `recurrent`. A static tree's children are drawn
without replacement; `PUBLIC_TREE` is the code's own.

The paper calls f_t the "second-to-top-layer" feature; the public code and weights read
the state after the final norm. EAGLE-2 (arXiv:2406.16858) is this drafter with a
`DynamicTree` as its topology. Departs from the code: a training row counts if it and
its next token are to be learned (the code drops only the last row of a text), the noise
is scaled by the place of a text's last token to learn, and weights start as normal
noise of deviation 0.02, not as torch's linear layers do.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.drafters.recurrent import Recurrent, check, check_target
from specjax.layers import dense, of_layers
from specjax.transformer import Layer, Shared, TransformerConfig, locate
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Float, Params, PRNGKey

# The hand-made tree of the public code (`mc_sim_7b_63`): 25 nodes under the anchor.
PUBLIC_TREE = Tree.of_paths(
    [
        *[(0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1)],
        *[(0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0), (1, 1)],
        *[(2, 0), (2, 1), (3, 0)],
    ]
)


class Net(nn.Module):
    """Eq. 1 to 3. Parameters: `fc`, `fc_bias`, `layer`."""

    drafter: "Eagle"

    @nn.compact
    def __call__(
        self, e: Float[Array, "B T D"], f: Float[Array, "B T D"], block, slots
    ):
        d, D = self.drafter, self.drafter.config.width
        e = e.astype(f.dtype) if d.inputs != "feature" else jnp.zeros_like(f)
        f = f if d.inputs != "token" else jnp.zeros_like(f)
        fc = self.param("fc", nn.initializers.normal(0.02), (D, 2 * D))
        u = dense(jnp.concatenate([e, f], axis=-1), fc)
        if d.fc_bias:
            b = self.param("fc_bias", nn.initializers.zeros, (D,))
            u = u + b.astype(u.dtype)[None, None]
        return of_layers(Layer)(d.config, norm_input=False, name="layer")(
            u, block, slots
        )


@dataclasses.dataclass(frozen=True)
class Eagle(Recurrent):
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="last features, tokens",
        passes="gamma",
        trained="one layer, fusion",
        paper="Li et al., arXiv:2401.15077",
        year=2024,
    )

    config: TransformerConfig  # of the layer; its width is the target's
    gamma: int = 5  # drafted tokens per round
    w_feature: float = 1.0  # of eq. 5
    w_token: float = 0.1  # of eq. 5
    noise: float = 0.2  # of the features: uniform, 512 noise wide over a text's length
    fc_bias: bool = True  # of eq. 1
    # What the layer reads of a pair; what is left out is zero.
    inputs: Literal["both", "feature", "token"] = "both"
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        check(self)
        for name in ("w_feature", "w_token", "noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"eagle needs {name} >= 0, got {getattr(self, name)}.")
        if self.inputs not in ("both", "feature", "token"):
            raise ValueError(
                f"eagle reads both, feature or token; got inputs={self.inputs!r}."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """One layer of the target's shape, without what its own layers add to Llama."""
        del mask_token_id
        values: dict[str, Any] = {"config": config.plain_layer()} | fields
        return cls(**values)

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,)

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        check_target(self, shared)
        x = jnp.zeros((1, 1, self.config.width), jnp.float32)
        block = locate(self.config, (1, 1), None, None, None)
        return Net(self).init(key, x, x, block, None)["params"]

    def fuse(self, params, features):
        del params
        return features

    def step(self, params, e, g, block, slots) -> Any:
        return Net(self).apply({"params": params}, e, g, block, slots)

    def logits(self, params, shared: Shared, y):
        """Eq. 4 before the softmax."""
        del params
        return shared.logits(y)

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 5 over rows that have learned tokens at their own and the next place.

        "alpha" unrolls the drafter on clean features and its own outputs from every
        THIN-th row, with the text's tokens.
        """
        noisy = batch.features + draw_noise(key, batch, self.noise)
        y = self.unroll(params, shared, batch.tokens, noisy, every=1, steps=1)[0]
        feature, hidden = base.shift(batch.features, 1), base.shift(batch.hidden, 1)
        wanted = batch.mask & base.shift(batch.mask, 1)
        regression = base.smooth_l1(y, feature)
        v = base.masked_mean(regression, wanted)
        ces = base.law_losses(shared.logits, y, shared, hidden)
        ce = base.masked_mean(ces, wanted)

        frozen = jax.lax.stop_gradient(params)
        drafts = self.unroll(
            frozen,
            shared,
            batch.tokens,
            batch.features,
            every=base.THIN,
            steps=self.tree.depth,
        )
        logs = self.acceptance(frozen, shared, batch, drafts)
        return self.w_feature * v + self.w_token * ce, {
            "regression": v,
            "ce": ce,
        } | logs


def draw_noise(key: PRNGKey, batch: Batch, noise: float) -> Float[Array, "B T D"]:
    """Uniform noise for the features, +-(noise / 2) at a text of 512 tokens.

    Each place has its own key, so that padding changes no text's noise.
    """
    B, T, D = batch.features.shape
    keys = base.place_keys(key, (B, T))
    dtype = batch.features.dtype
    draw = lambda k: jax.random.uniform(k, (D,), dtype, minval=-0.5, maxval=0.5)
    place = jnp.where(batch.mask, jnp.arange(1, T + 1)[None], 1)
    length = jnp.max(place, axis=1).astype(jnp.float32)
    scale = (noise * 512.0 / length).astype(dtype)
    return jax.vmap(jax.vmap(draw))(keys) * scale[:, None, None]
