"""PARD-2: PARD that may see the target, trained on what the target would accept.

arXiv:2605.08632 (2026); reference code AMD-AGI/PARD 6f279bf. Round, masks and dropped
tokens are those of `pard`. Of the target it may read M states of the token before, F_t,
side by side, which one linear map adds to the input embeddings:

    row of x_t:       e(x_t) + scale W F_{t-1},    F_{-1} = 0                     (1)
    masks behind x_t: e(m)   + scale W F_{t-1}     the features of their anchor   (2)

Token t stays at position t, the first one included (EAGLE has its pair at t - 1 and no
first token). Dual mode: in training a text loses its features with probability `gate`,
all at once, so that one set of weights drafts with them or, as PARD does, without
(`use_features=False`), then for any target of the vocabulary.

A token at depth d matters only if the d tokens behind the masks before it are accepted.
With g_j the target's own probability of the text's token x_j, row (a, d) weighs

    w = g_{a+1} g_{a+2} .. g_{a+d}                                                (3)

(confidence-adaptive tokens; depth 0 weighs 1, and x_{a+d+1} itself has no part), and

    loss = w_ce sum w CE(row, x_{a+d+1}) / sum w
         + w_kd sum w KL(p_{a+d+1} || row) / sum w                                (4)

with p the target's law on the text, sums over the whole batch. A file of its own: the
loss, what it reads and its weights are not PARD's, the rest is inherited.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax import sharding
from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.drafters.parallel import Rows
from specjax.drafters.pard import Pard
from specjax.layers import dense
from specjax.transformer import Shared, TransformerConfig, tables
from specjax.typing import Array, Float, Int, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class Pard2(Pard):
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="tokens, features of several layers",
        passes="1",
        trained="the whole model, fusion",
        paper="PARD-2, arXiv:2605.08632",
        year=2026,
    )
    adapts: ClassVar[tuple[str, ...]] = ("draft_model", "pard")

    gamma: int = 15  # drafted tokens per round
    blocks: int = 16  # K, offsets trained
    floor: float = 0.1  # share of the tokens kept at any depth
    target_states: tuple[int, ...] = ()  # M states from the last one down, as -1, -8
    scale: float = 0.02  # of eq. 1
    gate: float = 0.2  # share of the training texts without features
    w_ce: float = 0.1  # of eq. 4
    w_kd: float = 1.0  # of eq. 4
    use_features: bool = True  # False: drafts as PARD does

    def __post_init__(self):
        super().__post_init__()
        if not self.target_states or max(self.target_states) > -1:
            raise ValueError(
                "pard2 counts target_states from the last one, -1, down; got "
                f"{self.target_states}."
            )
        if not 0 <= self.gate < 1:
            raise ValueError(f"pard2 needs 0 <= gate < 1, got {self.gate}.")
        for name in ("scale", "w_ce", "w_kd"):
            if getattr(self, name) < 0:
                raise ValueError(f"pard2 needs {name} >= 0, got {getattr(self, name)}.")

    @classmethod
    def adapt(cls, model, config: TransformerConfig, mask_token_id, **fields):
        """The last state of the target and three below, at most eight layers apart."""
        apart = min(8, max(2, config.num_layers // 4))
        states = (-1, *(-apart * i for i in (1, 2, 3)))
        states = tuple(i for i in states if i >= -config.num_layers)
        values = {"target_states": states} | fields
        return super().adapt(model, config, mask_token_id, **values)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.target_states if self.use_features else ()

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        params = super().init(key, shared)
        width = len(self.target_states) * shared.embed.shape[1]
        shape, limit = (self.config.width, width), width**-0.5
        draw = jax.random.uniform(jax.random.fold_in(key, 1), shape)
        return {**params, "projection": limit * (2 * draw - 1)}

    def embed(
        self, params, tokens: Int[Array, "B T"], features: Float[Array, "B T MD"]
    ) -> Array:
        """Eq. 1 and 2; `features` are those of the token before, or empty."""
        e = sharding.look_up(params["embed"], tokens)
        if not self.use_features:
            return e
        more = dense(features, params["projection"], jnp.float32)
        return e + (self.scale * more).astype(e.dtype)

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 4; "alpha" is with the features that the drafter is set to read."""
        rows_key, gate_key = jax.random.split(key)
        rows = self.rows(rows_key, batch.mask)
        keys = base.place_keys(gate_key, (len(batch.tokens), 1))[:, 0]
        is_open = jax.vmap(jax.random.uniform)(keys) >= self.gate
        gated = jnp.where(is_open[:, None, None], batch.features, 0.0)
        gated = dataclasses.replace(batch, features=gated.astype(batch.features.dtype))
        x = self.states(params, gated, rows)
        own = tables(self.config, params)

        place = rows.position + 1
        wanted = rows.read(batch.mask, place)
        weights = jnp.where(wanted, self.confidence(shared, batch, rows), 0.0)

        def values(x, hidden, label):
            target, logits = shared.logits(hidden), own.logits(x)
            p, soft = jax.nn.softmax(target, axis=-1), base.soft_cross_entropy
            kd = soft(logits, p) - soft(target, p)
            return base.cross_entropy(logits, label), kd

        hidden = rows.read(batch.hidden, rows.position)
        args = x, hidden, rows.read(batch.tokens, place)
        ce, kd = base.few_places(values, self.config.vocab_size, *args)
        ce, kd = base.masked_mean(ce, weights), base.masked_mean(kd, weights)
        logs = {"ce": ce, "kd": kd} | self.judge(params, shared, batch)
        return self.w_ce * ce + self.w_kd * kd, logs

    def confidence(
        self, shared: Shared, batch: Batch, rows: Rows
    ) -> Float[Array, "B R"]:
        """Eq. 3."""
        text = base.shift(batch.tokens, 1)
        V = self.config.vocab_size
        log_g = -base.label_losses(shared.logits, V, batch.hidden, text)[:, :-1]
        log_g = jnp.pad(log_g, ((0, 0), (1, 0)))  # of each token; the first has 1
        total: Any = jnp.zeros(rows.anchor.shape, jnp.float32)
        for i in range(self.blocks - 1):
            of_one = rows.read(log_g, rows.position - i)
            total += jnp.where(i < rows.depth, of_one, 0.0)
        return jnp.exp(total)
