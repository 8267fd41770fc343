"""Multi-token prediction: one decoder layer a depth, chained, that the target ships.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; layout of the released weights
(deepseek-ai/DeepSeek-V3, `transformers` 5.24). With h^0_i the state of the target that
its own head reads at position i, and e(.) its embedding, module k = 1..D does

    v_i = P_k [RMS(e(x_{i+k})); RMS(h^{k-1}_i)]      for every row i that has x_{i+k}
    y_i = Layer_k(v)_i                               causal over the rows           (1)
    h^k_i = RMS(y_i)                                 its own norm                   (2)
    q(x_{i+k+1}) = softmax(U h^k_i)                  U the target's head            (3)
    loss = w sum_k L^k / D                           L^k: cross-entropy of depth k  (4)

The layer is one of the target's own kind. Step k of a draft uses module k; past D the
last module goes on from its own output, one row further each step (vLLM takes module
k mod D there, `transformers` stops). `unroll` > D trains
for that: steps past D run on the same rows, step k weighted by decay^(k-1) (FastMTP,
Cai et al. 2025, arXiv:2509.18362: one module, 3 steps, 0.6).

Where paper and released code differ the code is followed: the paper writes the hidden
state first in the concatenation, the weights have the embedding first. h^0 and, by
default, what a module hands on are taken after the norm (`carry="raw"`: before it).

The rows of a text are known one token late, and the last k - 1 rows of module k held
drafted tokens. So every round feeds the last `window` committed tokens again, with the
target's true states, in the pass that also gives the first draft; what lies before is
never touched again.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_tree, mla
from specjax.drafters import base
from specjax.drafters.base import Batch, Card
from specjax.drafters.recurrent import State, append, read_text
from specjax.kv_cache import KVCache
from specjax.layers import RMSNorm, dense
from specjax.mla import DeepSeekConfig
from specjax.transformer import Block, Shared, TransformerConfig, locate
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Float, Int, Params, PRNGKey


class Module(nn.Module):
    """Eq. 1 and 2."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, h, e, block: Block, slots):
        """h^k and y of the rows, and the layer's cache entries."""
        c, D = self.config, h.shape[-1]
        e = RMSNorm(c.norm_eps, name="embed_norm")(e)
        h = RMSNorm(c.norm_eps, name="hidden_norm")(h)
        proj = self.param("proj", nn.initializers.normal(0.02), (D, 2 * D))
        v = dense(jnp.concatenate([e, h], axis=-1), proj)
        y, slots = mla.last_layer(c, name="layer")(v, block, slots)
        return RMSNorm(c.norm_eps, name="norm")(y), y, slots


@dataclasses.dataclass(frozen=True)
class MTP:
    """Hyperparameters; the module has the method, `base.Drafter` the interface."""

    card: ClassVar[Card] = Card(
        reads="last feature, tokens",
        passes="gamma",
        trained="modules",
        paper="DeepSeek-AI, arXiv:2412.19437",
        year=2024,
    )

    config: TransformerConfig  # of a module's layer
    num_modules: int = 1  # D of the paper
    gamma: int = 4  # drafted tokens per round
    weight: float = 1.0  # w of eq. 4; beside a pretraining loss 0.3, then 0.1
    unroll: int | None = None  # steps trained; None: one a module
    decay: float = 1.0  # step k weighs decay^(k-1); 1 is the mean of eq. 4
    carry: Literal["normed", "raw"] = "normed"  # handed on after or before eq. 2
    topology: Tree | DynamicTree | None = None  # None: a chain of gamma tokens

    def __post_init__(self):
        for name in ("gamma", "num_modules"):
            if getattr(self, name) < 1:
                raise ValueError(f"mtp needs {name} >= 1, got {getattr(self, name)}.")
        if self.unroll is not None and self.unroll < self.num_modules:
            raise ValueError(
                f"mtp trains every module: unroll={self.unroll} is less than "
                f"num_modules={self.num_modules}. Raise it or leave it out."
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"mtp needs 0 < decay <= 1, got {self.decay}.")
        if not self.weight > 0:
            raise ValueError(f"mtp needs weight > 0, got {self.weight}.")
        if self.carry not in ("normed", "raw"):
            raise ValueError(f"mtp carries normed or raw, got {self.carry!r}.")

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """One module, a layer of the target's shape that sees all keys.

        It is one of the target's own kind, but of the Llama form for Gemma.

        It is trained for as many steps as are drafted. For eq. 4 alone give unroll=None
        and decay=1; a module so trained reached tau 2.14, 2.12 and 1.54 on code, math
        and chat of the tiny target (greedy, `bench --quick`) in place of 2.35, 2.64
        and 1.64: as good at its first step, and soon lost past it.
        """
        del mask_token_id
        own = isinstance(config, DeepSeekConfig) or type(config) is TransformerConfig
        kind = config if own else config.plain_layer()
        layer = dataclasses.replace(kind, num_layers=1, windows=())
        values: dict[str, Any] = {"config": layer, "decay": 0.8} | fields
        if "unroll" not in fields:
            drafted = values.get("gamma", cls.gamma)
            values["unroll"] = max(drafted, values.get("num_modules", 1))
        return cls(**values)

    @property
    def tree(self) -> Tree | DynamicTree:
        return self.topology or Tree.chain(self.gamma)

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,)

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def window(self) -> int:
        """P: after a full accept, rows so far back held a drafted token."""
        return self.tree.depth + self.num_modules

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        D = shared.embed.shape[1]
        if self.config.width != D:
            raise ValueError(
                f"mtp has width {self.config.width}, the target {D}; a module reads "
                "the target's own states."
            )
        x = jnp.zeros((1, 1, D), shared.embed.dtype)
        block = locate(self.config, (1, 1), None, None, None)
        net = Module(self.config)
        keys = jax.random.split(key, self.num_modules)
        return {
            f"module_{k}": net.init(keys[k - 1], x, x, block, None)["params"]
            for k in range(1, self.num_modules + 1)
        }

    def module(
        self, params, k: int, h, e, cache: KVCache | None = None, **block
    ) -> tuple[Array, Array, Any]:
        """Eq. 1 and 2 of module k over the rows that follow the cache's length.

        Returns h^k, what step k + 1 goes on from, and the cache, its length as it was.
        """
        names = ("ancestors", "depths", "behind")
        where = [block.get(n, 0 if n == "behind" else None) for n in names]
        at = locate(self.config, h.shape[:2], cache, *where)
        slots = None if cache is None else (cache.k[k - 1], cache.v[k - 1])
        weights = {"params": params[f"module_{k}"]}
        out: Any = Module(self.config).apply(weights, h, e, at, slots)
        g, y, new = out
        if cache is not None:
            put = lambda xs, x: (*xs[: k - 1], x, *xs[k:])
            cache = KVCache(put(cache.k, new[0]), put(cache.v, new[1]), cache.length)
        return g, g if self.carry == "normed" else y, cache

    def steps(
        self,
        params: Params,
        shared: Shared,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        num_steps: int,
    ) -> list[Float[Array, "B T D"]]:
        """h^k at every row for k = 1 .. num_steps, on the tokens of the text itself.

        Row i of step k predicts x_{i+k+1}. Steps past D stay on the same rows.
        """
        states, h = [], hidden
        for k in range(1, num_steps + 1):
            e = shared.embedding(base.shift(tokens, k))
            g, h, _ = self.module(params, min(k, self.num_modules), h, e)
            states.append(g)
        return states

    def prefill(
        self, params, shared: Shared, tokens, lengths, features, cache_size
    ) -> State:
        c, B, P = self.config, tokens.shape[0], self.window
        # A round feeds P rows and leaves the entries of its nodes behind them.
        room = P + 2 + (draft_tree.num_slots(self.tree) if self.tree.depth > 1 else 0)
        size = cache_size + room
        cache = mla.init_cache(c, self.num_modules, B, size, features.dtype)
        h = features
        for k in range(1, self.num_modules + 1):
            e = shared.embedding(base.shift(tokens, k))
            _, h, cache = self.module(params, k, h, e, cache)
        return read_text(cache, P, tokens, features, lengths)

    def draft(self, params, shared: Shared, state: State, anchor, sampling, keys):
        logits, ends, cache = self._first_step(params, shared, state, anchor)
        tree = self.tree
        if tree.depth == 1:
            draft = draft_tree.from_laws(tree, logits[:, None], sampling, keys)
        else:
            first = state.cache.length + state.num_fresh

            def step(cache, tokens, h, sees, level):
                return self._level(params, shared, first, cache, tokens, h, sees, level)

            draft, cache = draft_tree.grow_from(
                tree, logits, ends, step, cache, sampling, keys
            )
        cache = dataclasses.replace(cache, length=state.cache.length)
        return draft, dataclasses.replace(state, cache=cache)

    def _first_step(self, params, shared: Shared, state: State, anchor):
        """All modules over the fresh rows: the law of step 1, and each module's end.

        Module k ends at the row whose token is the anchor, k - 1 rows before module 1.
        A text of fewer than k tokens has no such row; row 0 stands in for it.
        """
        rows, n, D = jnp.arange(anchor.shape[0]), state.num_fresh, self.num_modules
        ids = jnp.pad(state.tokens, ((0, 0), (0, D))).at[rows, n].set(anchor)
        h, cache, laws, ends = state.features, state.cache, [], []
        for k in range(1, D + 1):
            e = shared.embedding(ids[:, k : k + self.window])
            g, h, cache = self.module(params, k, h, e, cache)
            end = jnp.maximum(n - k, 0)
            laws.append(g[rows, end])
            ends.append(h[rows, end])
        return shared.logits(laws[0]), jnp.stack(ends, axis=1), cache

    def _level(self, params, shared: Shared, first, cache, tokens, h, sees, level):
        """A pass over W nodes at depth j = level + 1: the laws of step j + 1.

        A node is the token of module k's row n + j - k, whose h^{k-1} came with the
        node above it; only the last module goes on past row n - 1, from its own h.
        `h` [B W D Width] is what each module hands on at the nodes above.
        """
        D, W, M = self.num_modules, tokens.shape[1], sees.shape[2]
        e = shared.embedding(tokens)
        depths = np.repeat(np.arange(M // W), W).astype(np.int32)

        new = [h[:, :, k] for k in range(D)]
        law = jnp.zeros_like(e)
        for k in range(min(2, D), D + 1):
            # Module k < D has no step past k: what it computes there nobody reads.
            x = h[:, :, max(k - 2, 0)]
            if k == D:
                x = jnp.where(level + 1 >= D, h[:, :, D - 1], x)
            start = dataclasses.replace(cache, length=jnp.maximum(first - k + 1, 0))
            g, new[k - 1], cache = self.module(
                params,
                k,
                x,
                e,
                start,
                ancestors=sees,
                depths=depths,
                behind=level * W,
            )
            law = jnp.where(k == jnp.minimum(level + 2, D), g, law)
        return shared.logits(law), jnp.stack(new, axis=2), cache

    def commit(self, params, shared, state: State, verdict, tokens, features) -> State:
        del params, shared
        return append(state, tokens, features, verdict.num_committed)

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 4, each step averaged over the rows whose label is to be learned.

        "alpha" is that of these very steps. Past D a drafted row sees the text's rows
        as step D left them, here as its own step would: a small difference.
        """
        del key
        trained, G = self.unroll or self.num_modules, self.tree.depth
        states = self.steps(
            params, shared, batch.tokens, batch.features, max(trained, G)
        )

        def values(late, label):
            return [base.cross_entropy(shared.logits(g), label) for g in late]

        scores, late = trained * shared.embed.shape[0], base.late(states[:trained])
        ces = base.few_places(values, scores, late, base.shift(batch.tokens, 1))
        ce = base.late_means(ces, base.shift(batch.mask, 1))
        w = self.decay ** np.arange(trained, dtype=np.float32)
        laws = [shared.logits(g[:, :: base.THIN]) for g in states[:G]]
        logs = base.step_acceptance(laws, shared, batch)
        return self.weight * jnp.sum(ce * (w / w.sum())), {"ce": ce} | logs
