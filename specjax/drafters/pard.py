"""PARD: an independent small model drafts a whole block in one pass over mask tokens.

An et al. 2025, arXiv:2504.18583; reference code AMD-AGI/PARD 6f279bf. The model is that
of `draft_model`, weights and all, with one unused id as the mask token m. It reads
nothing of the target, so one drafter serves every target of its vocabulary:

    q_k = M(x_{<=t}, m_1 .. m_{k-1}),   m_i = m            k = 1..G, one pass      (1)

the row of the anchor x_t gives q_1 and the row of mask k - 1 gives q_k. No token of a
block depends on another one drafted. As all masks share one id, more tokens can be
drafted than `blocks`, the offsets it was trained for.

Adaptation trains all weights, the mask's row included, on K = `blocks` copies of a text
flattened into one (`parallel` has the rows, their visibility and the tokens dropped):

    loss = mean of CE(row (a, d), x_{a+d+1}) over all kept rows of all depths      (2)

pooled, with no weight by depth. A row with a = -1 has masks alone before it; the code
trains these too. It draws one selection for all texts of a batch and from all places of
a text, prompt included, and its last kept row has no label; here each text has its own
selection, of rows that predict a token to learn (`Batch.mask`), and every row counts.
There are as many slots as the code has rows; a chain that leaves the text ends, where
the code goes on with rows that have no label. The code drafts 12 tokens by default.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_tree, kv_cache, sharding
from specjax.drafters import base, parallel, recurrent
from specjax.drafters.base import Batch, Card
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.parallel import Rows
from specjax.drafters.recurrent import State
from specjax.kv_cache import KVCache
from specjax.transformer import Output, Shared, Transformer, TransformerConfig, tables
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Bool, Float, Int, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class Pard:
    """Hyperparameters; the module has the method, `base.Drafter` the interface.

    In `State` the pair of place t is (features of x_t, x_{t+1}), and the cache holds
    the first token as well, which stands in no pair.
    """

    card: ClassVar[Card] = Card(
        reads="tokens",
        passes="1",
        trained="the whole model",
        paper="An et al., arXiv:2504.18583",
        year=2025,
    )
    adapts: ClassVar[tuple[str, ...]] = ("draft_model",)  # a training may start so

    config: TransformerConfig
    mask_token_id: int  # an id that no text holds
    gamma: int = 8  # drafted tokens per round
    blocks: int = 8  # K, offsets trained
    rate: float = 0.7  # of the tokens kept from one depth to the next
    floor: float = 0.2  # share of the tokens kept at any depth
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        name = type(self).__name__.lower()
        for field in ("gamma", "blocks"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{name} needs {field} >= 1, got {getattr(self, field)}."
                )
        if not (0 < self.rate <= 1 and 0 <= self.floor <= 1):
            raise ValueError(
                f"{name} keeps shares of the tokens: rate={self.rate} must be in "
                f"(0, 1] and floor={self.floor} in [0, 1]."
            )
        if not 0 <= self.mask_token_id < self.config.vocab_size:
            raise ValueError(
                f"{name} has mask_token_id={self.mask_token_id}; choose an unused one "
                f"of the {self.config.vocab_size} ids."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """The shape that an independent model would have."""
        model = DraftModel.for_target(config, None)
        return cls.adapt(model, config, mask_token_id, **fields)

    @classmethod
    def adapt(
        cls, model: DraftModel, config: TransformerConfig, mask_token_id, **fields
    ):
        """A drafter whose weights may start as those of a draft model."""
        del config
        if mask_token_id is None and "mask_token_id" not in fields:
            raise ValueError(
                f"{cls.__name__.lower()} needs a mask token and the target's tokenizer "
                "names none; give mask_token_id, an id that no text holds."
            )
        values: dict[str, Any] = {
            "config": model.config,
            "mask_token_id": mask_token_id,
        }
        return cls(**values | fields)

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
        return DraftModel(self.config).init(key, shared)

    def embed(self, params, tokens: Int[Array, "B T"], features) -> Array:
        """What the model reads: the tokens alone; the features are empty."""
        del features
        return sharding.look_up(params["embed"], tokens)

    def run(self, params, x: Float[Array, "B T D"], cache=None, **block) -> Output:
        """One pass of the model over embedded tokens."""
        net = Transformer(self.config)
        params = {name: params[name] for name in params if name != "projection"}
        where = {"ancestors": None, "depths": None, "taps": ()} | block
        method = Transformer.run
        return net.apply({"params": params}, x, cache, method=method, **where)  # pyright: ignore[reportReturnType]

    def prefill(self, params, shared, tokens, lengths, features, cache_size) -> State:
        del shared
        c, (B, T) = self.config, tokens.shape
        empty = kv_cache.init(
            c.num_layers,
            B,
            c.num_kv_heads,
            cache_size + self.tree.depth + 2,
            c.head_width,
            params["embed"].dtype,
        )
        before = jnp.pad(features, ((0, 0), (1, 0), (0, 0)))[:, :T]
        cache: KVCache = self.run(
            params, self.embed(params, tokens, before), empty
        ).cache
        cache = kv_cache.commit(cache, None, jnp.ones((B,), jnp.int32))
        P = self.tree.depth + 1
        return recurrent.read_text(cache, P, tokens, features, lengths)

    def draft(self, params, shared, state: State, anchor, sampling, keys):
        del shared
        rows, depth = jnp.arange(anchor.shape[0])[:, None], self.tree.depth
        tokens, pair, drafts = parallel.fill(state, anchor, self.mask_token_id, depth)
        x = self.embed(params, tokens, state.features[rows, pair])
        out = self.run(params, x, state.cache)
        logits = tables(self.config, params).logits(out.hidden[rows, drafts])
        draft = draft_tree.from_laws(self.tree, logits, sampling, keys)
        # The masks' entries stay past `length`, where nothing sees them.
        return draft, dataclasses.replace(state, cache=out.cache)

    def commit(self, params, shared, state: State, verdict, tokens, features) -> State:
        del params, shared
        return recurrent.append(state, tokens, features, verdict.num_committed)

    def rows(self, key: PRNGKey, mask: Bool[Array, "B T"]) -> Rows:
        """The rows of training texts: each masked one predicts a token of `mask`."""
        kept = lambda n: [
            parallel.num_kept(n, d, self.rate, self.floor)
            for d in range(1, self.blocks)
        ]
        sizes = np.array([kept(n) for n in range(mask.shape[1] + 1)], int)
        n = jnp.sum(mask, axis=1)
        return parallel.drop(key, base.shift(mask, 1), n, sizes, first=-1)

    def states(self, params, batch: Batch, rows: Rows) -> Float[Array, "B R D"]:
        """Last states at rows of the flattened texts.

        All rows of an anchor have the features of the token before it.
        """
        features = rows.read(batch.features, rows.anchor - 1)
        x = self.embed(params, rows.tokens(batch.tokens, self.mask_token_id), features)
        sees = parallel.sees(self.config, rows)
        return self.run(params, x, ancestors=sees, depths=rows.position).hidden

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 2; "alpha" is of drafts from every THIN-th place, nothing dropped."""
        rows = self.rows(key, batch.mask)
        x, label = self.states(params, batch, rows), rows.position + 1
        logits, V = tables(self.config, params).logits, self.config.vocab_size
        ce = base.label_losses(logits, V, x, rows.read(batch.tokens, label))
        wanted = rows.read(batch.mask, rows.position + 1)
        return base.masked_mean(ce, wanted), self.judge(params, shared, batch)

    def judge(self, params, shared: Shared, batch: Batch) -> dict[str, Array]:
        frozen = jax.lax.stop_gradient(params)
        own = tables(self.config, frozen)

        def logits(rows, where):
            return own.logits(self.states(frozen, batch, rows)[:, where])

        return parallel.judge(logits, shared, batch, self.tree.depth, offset=0)
