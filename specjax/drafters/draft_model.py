"""An independent small language model drafts token by token (speculative sampling).

Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. It reads
token ids alone and keeps its own cache:

    q_k = M_q(x_{<=t}, d_1 .. d_{k-1}),  d_k ~ q_k        k = 1..G

A round feeds the anchor and d_1 .. d_{G-1}, never d_G. After a full accept the cache
therefore lacks d_G, the text would not show it, and acceptance would quietly fall. Here
the last committed token is always fed again together with the anchor: the first pass
has two tokens, the cache is one slot short by definition, and no case is special. A
tree (`topology`) is grown by one pass a level, and its entries lie where their nodes
were drafted; there all tokens that a round committed are fed again.

Any checkpoint works untrained; distilling it raises acceptance (Zhou et al. 2023,
DistillSpec, arXiv:2310.08461). With p the target's law the losses are CE to the text,
forward and reverse KL, JSD and TV; 1 - TV is the acceptance itself.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_tree, kv_cache
from specjax.drafters import base
from specjax.drafters.base import Batch, Card, Draft
from specjax.kv_cache import KVCache
from specjax.pytree import pytree
from specjax.transformer import Output, Shared, Transformer, TransformerConfig, tables
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Float, Int, Params, PRNGKey


@pytree
class State:
    cache: KVCache  # all committed tokens but the fresh ones
    # Committed tokens to feed with the anchor: of a chain the last one, of a tree all
    # that the last round committed.
    fresh: Int[Array, "B P"]
    num_fresh: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="tokens",
        passes="gamma",
        trained="the whole model",
        paper="Leviathan et al., arXiv:2211.17192",
        year=2022,
    )

    config: TransformerConfig
    gamma: int = 4  # drafted tokens per round
    distill: Literal["ce", "fkl", "rkl", "jsd", "tv"] = "fkl"
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        if self.gamma < 1:
            raise ValueError(f"draft_model needs gamma >= 1, got {self.gamma}.")
        if self.distill not in DIVERGENCES and self.distill != "ce":
            raise ValueError(
                f"unknown loss distill={self.distill!r}; known: ce, "
                f"{', '.join(DIVERGENCES)}."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """A quarter of the target's layers; wide and shallow is fast for its size."""
        del mask_token_id
        num_layers = config.num_layers
        if type(config) is not TransformerConfig:  # DeepSeek's, Gemma's
            config = config.plain_layer()
        small = dataclasses.replace(
            config,
            num_layers=max(num_layers // 4, 1),
            tie_embeddings=True,
            windows=(),
        )
        values: dict[str, Any] = {"config": small} | fields
        return cls(**values)

    @property
    def tree(self) -> Tree | DynamicTree:
        return self.topology or Tree.chain(self.gamma)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        if shared.embed.shape[0] != self.config.vocab_size:
            raise ValueError(
                f"draft model and target must share one vocabulary: it has "
                f"{self.config.vocab_size} ids, the target {shared.embed.shape[0]}."
            )
        tokens = jnp.zeros((1, 1), jnp.int32)
        params: Params = Transformer(self.config).init(key, tokens)["params"]
        if shared.embed.shape[1] == self.config.width:  # start from the target's table
            params = params | {"embed": shared.embed.astype(params["embed"].dtype)}
        return params

    def forward(self, params, tokens, cache=None, **block) -> tuple[Array, Any]:
        """One pass: logits [B T V] and the cache, its length as it was."""
        out = self.run(params, tokens, cache, **block)
        return tables(self.config, params).logits(out.hidden), out.cache

    def run(self, params, tokens, cache=None, **block) -> Output:
        net = Transformer(self.config)
        return net.apply({"params": params}, tokens, cache, **block)  # pyright: ignore[reportReturnType]

    def prefill(self, params, shared, tokens, lengths, features, cache_size) -> State:
        del shared, features
        c, B = self.config, tokens.shape[0]
        # A tree's passes leave their entries behind those of the fresh tokens.
        room = (
            0
            if self.tree.is_chain
            else self.tree.depth + draft_tree.num_slots(self.tree) + 2
        )
        empty = kv_cache.init(
            c.num_layers,
            B,
            c.num_kv_heads,
            cache_size + room,
            c.head_width,
            params["embed"].dtype,
        )
        _, cache = self.forward(params, tokens, empty)
        last = tokens[jnp.arange(B), lengths - 1]
        P = 1 if self.tree.is_chain else self.tree.depth + 1
        return State(
            cache=kv_cache.commit(cache, None, lengths - 1),
            fresh=jnp.pad(last[:, None], ((0, 0), (0, P - 1))),
            num_fresh=jnp.ones((B,), jnp.int32),
        )

    def draft(self, params, shared, state: State, anchor, sampling, keys):
        del shared
        rows, n = jnp.arange(anchor.shape[0]), state.num_fresh
        tokens = jnp.pad(state.fresh, ((0, 0), (0, 1))).at[rows, n].set(anchor)
        logits, cache = self.forward(params, tokens, state.cache)
        logits = logits[rows, n]
        cache = kv_cache.commit(cache, None, n)  # the anchor's entry comes next
        grow = self._grow_chain if self.tree.is_chain else self._grow_tree
        draft, cache = grow(params, logits, cache, sampling, keys)
        return draft, dataclasses.replace(state, cache=cache)

    def _grow_chain(self, params, logits, cache: KVCache, sampling, keys):
        committed = cache.length
        step_keys = jax.vmap(lambda k: jax.random.split(k, self.gamma))(keys)
        token, probs = base.draw(sampling, logits, step_keys[:, 0])

        def step(carry, keys):
            cache, token = carry
            cache = kv_cache.commit(cache, None, jnp.ones_like(token))
            logits, cache = self.forward(params, token[:, None], cache)
            token, probs = base.draw(sampling, logits[:, 0], keys)
            return (cache, token), (token, probs)

        (cache, _), rest = jax.lax.scan(
            step, (cache, token), step_keys[:, 1:].swapaxes(0, 1)
        )
        tokens = jnp.concatenate([token[:, None], rest[0].T], axis=1)
        probs = jnp.concatenate([probs[:, None], rest[1].swapaxes(0, 1)], axis=1)
        cache = dataclasses.replace(cache, length=committed)
        return Draft(tokens=tokens, probs=probs), cache

    def _grow_tree(self, params, logits, cache: KVCache, sampling, keys):
        slots = draft_tree.num_slots(self.tree)
        levels = max(self.tree.depth - 1, 1)
        depths = 1 + np.repeat(np.arange(levels), slots // levels)
        depths = np.concatenate([[0], depths]).astype(np.int32)  # the anchor is slot 0

        def step(cache, tokens, sees, level):
            sees = jnp.pad(sees, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            behind = 1 + level * tokens.shape[1]
            return self.forward(
                params, tokens, cache, ancestors=sees, depths=depths, behind=behind
            )

        return draft_tree.grow(self.tree, logits, step, cache, sampling, keys)

    def commit(self, params, shared, state: State, verdict, tokens, features) -> State:
        del params, shared, features
        if not self.tree.is_chain:
            return State(
                cache=state.cache, fresh=tokens, num_fresh=verdict.num_committed
            )
        last = jnp.take_along_axis(tokens, verdict.num_accepted[:, None], axis=1)
        cache = kv_cache.commit(state.cache, None, verdict.num_accepted)
        return State(cache=cache, fresh=last, num_fresh=state.num_fresh)

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Mean divergence from the target at the positions that predict an answer."""
        del key
        hidden = self.run(params, batch.tokens).hidden
        wanted = base.shift(batch.mask, 1)
        logits = tables(self.config, params).logits

        def distance(hidden, known, label):
            if self.distill == "ce":
                return base.cross_entropy(logits(hidden), label)
            return DIVERGENCES[self.distill](shared.logits(known), logits(hidden))

        args = hidden, batch.hidden, base.shift(batch.tokens, 1)
        values = base.few_places(distance, self.config.vocab_size, *args)
        drafts = lambda x: jnp.stack(  # every THIN-th start, the G positions from there
            [base.shift(x, k)[:, :: base.THIN] for k in range(self.gamma)], axis=2
        )
        pair = logits(drafts(hidden)), shared.logits(drafts(batch.hidden))
        logs = base.acceptance(base.overlap(*pair), drafts(wanted))
        return base.masked_mean(values, wanted), logs


def _kl(p_logits: Float[Array, "*B V"], q_logits: Float[Array, "*B V"]) -> Array:
    """KL(p || q), nats."""
    p, ce = jax.nn.softmax(p_logits), base.soft_cross_entropy
    return ce(q_logits, p) - ce(p_logits, p)


def _jsd(p_logits: Float[Array, "*B V"], q_logits: Float[Array, "*B V"]) -> Array:
    """Jensen-Shannon divergence at weight 1/2, nats."""
    log_p, log_q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * (_kl(log_p, log_m) + _kl(log_q, log_m))


DIVERGENCES = {  # (target logits, draft logits) -> one value a position
    "fkl": _kl,
    "rkl": lambda p, q: _kl(q, p),
    "jsd": _jsd,
    "tv": lambda p, q: 1.0 - base.overlap(q, p),
}
