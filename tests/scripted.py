"""A target that recites and a drafter that knows the text: the engine, no models."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import kv_cache
from specjax.drafters.base import Draft
from specjax.generate import Model, Weights
from specjax.sampling import GREEDY
from specjax.transformer import Output, Shared, TransformerConfig
from specjax.tree import Tree

V = 12


@dataclasses.dataclass(frozen=True)
class Reciter:
    """A target whose token at position i of the text is always `script[i]`."""

    script: tuple[int, ...]
    max_positions: int = 64

    @property
    def config(self):
        one = dict.fromkeys(("num_layers", "num_heads", "num_kv_heads", "mlp_width"), 1)
        return TransformerConfig(
            vocab_size=V, width=V, head_width=2, max_positions=self.max_positions, **one
        )

    def init_cache(self, batch_size, size, dtype=jnp.float32):
        return kv_cache.init(1, batch_size, 1, size, 2, dtype)

    def __call__(self, params, tokens, cache=None, depths=None, taps=(), **block):
        T = tokens.shape[1]
        depths = jnp.arange(T) if depths is None else jnp.asarray(depths)
        next_position = cache.length[:, None] + depths[None] + 1
        script = jnp.asarray(self.script)
        hidden = jax.nn.one_hot(script.at[next_position].get(mode="clip"), V)
        return Output(hidden, hidden[..., :0], cache)

    def logits(self, params, hidden):
        return 50.0 * hidden

    def shared(self, params):
        return Shared(embed=params["embed"], head=params["embed"])


@dataclasses.dataclass(frozen=True)
class Prompter:
    """Drafts the script, but for a wrong token at the positions `wrong`."""

    script: tuple[int, ...]
    gamma: int = 4
    wrong: tuple[int, ...] = ()
    honest: bool = True  # False stores a law that excludes what was drafted
    taps: tuple[int, ...] = ()
    max_positions: None = None

    @property
    def tree(self):
        return Tree.chain(self.gamma)

    def prefill(self, params, shared, tokens, lengths, features, cache_size):
        return lengths

    def draft(self, params, shared, state, anchor, sampling, keys):
        at = state[:, None] + 1 + jnp.arange(self.gamma)[None]
        tokens = jnp.asarray(self.script).at[at].get(mode="clip")
        wrong = jnp.isin(at, jnp.asarray(self.wrong, jnp.int32))
        tokens = jnp.where(wrong, (tokens + 1) % V, tokens).astype(jnp.int32)
        stored = tokens if self.honest else (tokens + 1) % V
        return Draft(tokens=tokens, probs=jax.nn.one_hot(stored, V)), state

    def commit(self, params, shared, state, verdict, tokens, features):
        return state + verdict.num_committed


def recite(script, sampling=GREEDY, stop_ids=(0,), max_positions=64, **fields):
    """A model of the two, and its weights."""
    target = Reciter(tuple(script), max_positions)
    model = Model(target, Prompter(tuple(script), **fields), sampling, stop_ids)
    return model, Weights(target={"embed": jnp.eye(V)}, drafter={})
