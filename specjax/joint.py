"""Training a drafter together with its target, which moves by low-rank adapters.

Medusa-2 (Cai et al. 2024, arXiv:2401.10774, section 2.2.2) lets the gradient of the
heads flow into the target, so that its states learn to carry later tokens, and keeps
what the target itself says by four means:

    loss = L_0 + lambda s(step) L_heads                                           (1)
    L_0 = CE(p', x), or, if the target wrote the data, KL(p || p')                (2)
    W' = W + (alpha / r) B A, for every matrix W of the target's layers           (3)

with p' the law of the moved target and p that of the first one. lambda is small, only
the heads learn in the first steps, and the target learns at a fraction of their rate.
The second form of eq. 2 is the paper's self-distillation. Eq. 3 is LoRA (Hu et al.
2021, arXiv:2106.09685): both targets are had from one set of weights.

A drafter with a property `joint` that is not None (`drafters.base.Joint`) is trained
so. The adapter stands in its parameters under "adapter" and `tuned` gives the target
that it belongs to. What is lossless is so with respect to that target; `quality` says
how far it is from the first one.

Departs from the reference code (axolotl fork ctlllll/axolotl 76bc572): no dropout; head
and embedding stay; KL is averaged over the tokens to learn, where that code divides by
all places, so that padding changes its weight; all parameters of the heads have the
larger rate, where that code leaves it from the biases; one schedule of the rate spans
both stages, which there are two runs.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.drafters import base
from specjax.drafters.base import Batch, Joint
from specjax.pytree import pytree
from specjax.targets.base import Pretrained, Target
from specjax.transformer import Shared
from specjax.typing import Array, Float, Params, PRNGKey

ADAPTER = "adapter"


def _matrices(params: Params) -> dict[str, Any]:
    """The matrices of a target's layers by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}
    return {k: x for k, x in named.items() if k.startswith("layer_") and x.ndim == 2}


def adapter(key: PRNGKey, params: Params, rank: int) -> Params:
    """A and B of eq. 3 for each matrix; B is zero, so the target starts as it is."""
    matrices = _matrices(params)
    keys = jax.random.split(key, len(matrices))

    def pair(key, w):
        out, into = w.shape
        limit = 1 / math.sqrt(into)
        a = jax.random.uniform(key, (rank, into), jnp.float32, -limit, limit)
        return {"a": a, "b": jnp.zeros((out, rank), jnp.float32)}

    named = zip(matrices.items(), keys, strict=True)
    return {path: pair(key, w) for (path, w), key in named}


def merge(params: Params, adapter: Params, scale: float) -> Params:
    """Eq. 3, in float32 and rounded to the weights' own dtype."""

    def moved(path, w):
        pair = adapter.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        if pair is None:
            return w
        change = scale * (pair["b"].astype(jnp.float32) @ pair["a"].astype(jnp.float32))
        return (w.astype(jnp.float32) + change).astype(w.dtype)

    return jax.tree_util.tree_map_with_path(moved, params)


def check(pretrained: Pretrained, params: Params) -> None:
    """Refuses an adapter, if there is one, that is not of this target."""
    pairs = params.get(ADAPTER)
    if pairs is None:
        return
    matrices = _matrices(jax.eval_shape(sharding.unstack, pretrained.params))
    shapes = {k: (p["b"].shape[0], p["a"].shape[1]) for k, p in pairs.items()}
    if shapes != {k: w.shape for k, w in matrices.items()}:
        raise ValueError(
            f"this drafter was trained together with another target than "
            f"{pretrained.name}: its adapter has {len(shapes)} matrices, of other "
            f"names or shapes than the target's {len(matrices)}. Give its own target."
        )


def tuned(pretrained: Pretrained, drafter: Any, params: Params) -> Pretrained:
    """The target that a drafter was trained with; `pretrained` itself for most.

    Raises ValueError if the adapter is not of this target.
    """
    settings = base.joint(drafter)
    if settings is None or ADAPTER not in params:
        return pretrained
    check(pretrained, params)
    pairs = params[ADAPTER]
    scale = settings.alpha / settings.rank
    weights = jax.jit(functools.partial(merge, scale=scale))(pretrained.params, pairs)
    return dataclasses.replace(
        pretrained, name=f"{pretrained.name} (tuned)", params=weights
    )


def part(
    tensors: dict[str, np.ndarray], rank: int
) -> tuple[dict[str, np.ndarray], dict[str, Params]]:
    """Parts stored tensors, named by path, into the drafter's and its adapter.

    Raises ValueError if the adapter is not whole, or not of this rank.
    """
    own, low = {}, {}
    for name, x in tensors.items():
        head, _, rest = name.partition(".")
        path, _, leaf = rest.rpartition(".")
        if head == ADAPTER:
            low.setdefault(path, {})[leaf] = x
        else:
            own[name] = x
    if not low:
        raise ValueError("its adapter is missing, so its own target is not known")
    for path, pair in low.items():
        have = {leaf: x.shape for leaf, x in pair.items()}
        a, b = have.get("a", ()), have.get("b", ())
        whole = len(have) == len(a) == len(b) == 2 and a[0] == b[1] == rank
        if not whole:
            raise ValueError(
                f"the adapter of {path or 'no matrix'} needs a [{rank}, in] and b "
                f"[out, {rank}], and has {have}"
            )
    return own, {ADAPTER: low}


@pytree
class Context:
    """What a joint step reads and does not train."""

    shared: Shared
    target: Params  # the first target
    progress: Float[Array, ""]  # share of the steps that are done


@dataclasses.dataclass(frozen=True)
class Learner:
    """Drafter and target as one thing to train: the trainer takes it for a drafter."""

    drafter: Any
    target: Target

    @property
    def settings(self) -> Joint:
        settings = base.joint(self.drafter)
        assert settings is not None
        return settings

    def start(
        self, key: PRNGKey, shared: Shared, target: Params, params: Params | None
    ) -> Params:
        """Parameters with an adapter; None initialises the drafter too."""
        heads, low = jax.random.split(key)
        whole = jax.jit(self.drafter.init)(heads, shared) if params is None else params
        if ADAPTER in whole:
            return whole
        return whole | {ADAPTER: adapter(low, target, self.settings.rank)}

    def loss(self, params: Params, context: Context, batch: Batch, key: PRNGKey):
        """Eq. 1. `batch` holds what the first target says of the texts."""
        s, shared = self.settings, context.shared
        moves = context.progress >= s.heads_first
        low = jax.tree.map(
            lambda x: jnp.where(moves, x, jax.lax.stop_gradient(x)), params[ADAPTER]
        )
        weights = merge(context.target, low, s.alpha / s.rank)
        out = self.target(weights, batch.tokens, None, taps=self.drafter.taps)
        logits = functools.partial(self.target.logits, weights)
        own, kl = self._own_loss(logits, out.hidden, shared, batch)
        tuned = dataclasses.replace(batch, features=out.features, hidden=out.hidden)
        heads, logs = self.drafter.loss(params, shared, tuned, key)
        total = own + s.head_weight * ramp(s.schedule, context.progress) * heads
        return total, logs | {"own": own, "kl": kl, "heads": heads}

    def _own_loss(self, logits_of, hidden, shared: Shared, batch: Batch):
        """Eq. 2, and the KL in any case."""

        def values(hidden, before, label):
            logits, first = logits_of(hidden), shared.logits(before)
            p, soft = jax.nn.softmax(first, axis=-1), base.soft_cross_entropy
            kl = soft(logits, p) - soft(first, p)
            return kl if self.settings.distil else base.cross_entropy(logits, label), kl

        args = hidden, batch.hidden, base.shift(batch.tokens, 1)
        wanted = base.shift(batch.mask, 1)
        means = base.few_places(values, shared.embed.shape[0], *args)
        return tuple(base.masked_mean(x, wanted) for x in means)

    def scale_updates(self, updates: Params) -> Params:
        """The target's share of the learning rate."""
        rate = self.settings.target_rate
        slow = jax.tree.map(lambda x: rate * x, updates[ADAPTER])
        return updates | {ADAPTER: slow}


def ramp(schedule: str, progress: Float[Array, ""]) -> Float[Array, ""]:
    """s of eq. 1, from the share of the steps that are done."""
    if schedule == "linear":
        return progress
    if schedule == "sine":
        return jnp.sin(jnp.pi / 2 * progress)
    return jnp.ones_like(progress)


@functools.partial(jax.jit, static_argnames=("target",))
def _compare(target: Target, first: Params, second: Params, tokens, mask):
    wanted = base.shift(mask, 1)
    label = base.shift(tokens, 1)
    a, b = (target.logits(w, target(w, tokens).hidden) for w in (first, second))
    p = jax.nn.softmax(a, axis=-1)
    soft = base.soft_cross_entropy
    mean = lambda x: jnp.sum(jnp.where(wanted, x, 0.0))
    return {
        "kl": mean(soft(b, p) - soft(a, p)),
        "agreement": mean((jnp.argmax(a, -1) == jnp.argmax(b, -1)).astype(jnp.float32)),
        "loss_before": mean(base.cross_entropy(a, label)),
        "loss_after": mean(base.cross_entropy(b, label)),
    }, jnp.sum(wanted)


def quality(
    first: Pretrained, second: Pretrained, texts: Any, batch_size: int = 8
) -> dict[str, float]:
    """How far a tuned target is from the first one, as means over tokens to learn.

    "kl" in nats from the first law to the second, "agreement" of their argmax,
    "loss_before" and "loss_after", the cross-entropy of the texts (nats). The texts
    (`corpus.Texts`) must not have been trained on.
    """
    sums: dict[str, float] = {}
    total = 0
    for start in range(0, len(texts), batch_size):
        rows = slice(start, start + batch_size)
        values, count = _compare(
            first.target,
            first.params,
            second.params,
            jnp.asarray(texts.tokens[rows]),
            jnp.asarray(texts.mask[rows]),
        )
        total += int(count)
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return {name: value / max(total, 1) for name, value in sums.items()}
