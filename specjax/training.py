"""One trainer for every drafter: a frozen target, the drafter's own loss, AdamW.

A step is a pure function of (parameters, optimiser state, step number): the batch and
the key are derived from the seed and the step, so a resumed run goes on exactly where
the first one stopped. Features come from the target on the fly or from a cache on disk
(`feature_cache`). On a mesh (`sharding`) the same step runs split over its devices.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from specjax import joint, preemption, run_state, sharding
from specjax.corpus import Texts
from specjax.drafters import base
from specjax.feature_cache import FeatureCache, features
from specjax.layers import rematerialised
from specjax.targets.base import Pretrained
from specjax.typing import Array, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation settings; the same for every drafter unless its paper says more."""

    steps: int = 300
    batch_size: int = 8  # texts per step
    learning_rate: float = 4e-3  # peak, reached after the warm-up
    warmup: float = 0.04  # share of the steps
    final: float = 0.05  # share of the peak that the cosine ends at
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # global norm
    seed: int = 0
    log_every: int = 10  # steps
    save_every: int = 200  # steps between checkpoints
    remat: bool = False  # keep what enters a layer and compute the rest again

    def __post_init__(self):
        for name in ("steps", "batch_size", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"training needs {name} >= 1, got {getattr(self, name)}."
                )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"learning_rate must be > 0 and finite, got {self.learning_rate}."
            )

    def schedule(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=max(1, round(self.warmup * self.steps)),
            decay_steps=max(self.steps, 2),
            end_value=self.learning_rate * self.final,
        )

    def optimiser(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.grad_clip),
            optax.adamw(self.schedule(), b2=0.95, weight_decay=self.weight_decay),
        )


@functools.partial(
    jax.jit, static_argnames=("drafter", "config"), donate_argnames=("params", "state")
)
def train_step(
    drafter: Any, config: TrainConfig, params: Params, state: Any, shared, batch, key
):
    """One optimiser step. `params` and `state` are donated.

    A batch with nothing to learn from has no gradient and moves nothing, the optimiser
    included; the metric "skipped" is then 1.
    """

    def loss(params):  # what a drafter logs beside it is left to `measure`
        with rematerialised() if config.remat else contextlib.nullcontext():
            return drafter.loss(params, shared, batch, key)[0]

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    updates, moved = config.optimiser().update(grads, state, params)
    if isinstance(drafter, joint.Learner):
        updates = drafter.scale_updates(updates)
    empty = norm == 0
    keep = lambda new, old: jnp.where(empty, old, new)
    params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
    state = jax.tree.map(keep, moved, state)
    params, state = map(sharding.constrain_params, (params, state))
    skipped = empty.astype(jnp.float32)
    return params, state, {"loss": value, "grad_norm": norm, "skipped": skipped}


@functools.partial(jax.jit, static_argnames=("drafter",))
def measure(drafter: Any, params: Params, shared, batch, key) -> dict[str, Array]:
    """What a drafter logs of a batch: a fifth of a step's time, so not every step."""
    return drafter.loss(params, shared, batch, key)[1]


def train(
    pretrained: Pretrained,
    drafter: Any,
    texts: Texts,
    config: TrainConfig = TrainConfig(),
    *,
    folder: str | pathlib.Path | None = None,
    params: Params | None = None,
    cache: FeatureCache | None = None,
    mesh: Mesh | None = None,
    log: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    stop_after: int | None = None,
    stop: Callable[[int], bool] = lambda step: False,
) -> Params:
    """Trains a drafter and returns its parameters.

    Args:
      folder: checkpoints go to its `checkpoints/`, and a run found there goes on.
      params: a warm start; None initialises by the drafter's own rule. A drafter that
        is trained together with its target (`joint`) gets an adapter if it has none.
      mesh: where weights, optimiser, target and batches are split; None: one device.
        In a run of several processes each calls this alike.
      log: called every `log_every` steps with loss, alpha by position, tau, tokens/s.
      stop_after: ends early at this step with a checkpoint, as a killed run would.
      stop: asked after every step whether to end there, with a checkpoint; then
        `preemption.Stopped` is raised.
    """
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    learner, target, context = _learner(pretrained, drafter, config, mesh)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sharding.use(mesh))
        weights, state = _begin(learner, config, init_key, context(0), params, mesh)
        keeper, first = None, 0
        if folder is not None:
            about = run_state.describe(pretrained, drafter, texts, config, weights)
            about["weights"] = sharding.fingerprint(target)
            about["features"] = cache.dtype if cache else "on the fly"
            keeper = run_state.Checkpoints(pathlib.Path(folder) / "checkpoints", about)
            stack.callback(keeper.close)
            first, weights, state = keeper.restore(weights, state)

        read = _reader(pretrained.target, target, drafter, texts, cache, mesh)
        last = min(config.steps, stop_after or config.steps)
        began, tokens_seen = time.perf_counter(), 0
        for step in range(first, last):
            rows = texts.batch(step, config.batch_size, config.seed)
            batch = read(rows)
            key: PRNGKey = jax.random.fold_in(run_key, step)
            done = step + 1
            logs = done % config.log_every == 0 or done == last
            saves = keeper and (done % config.save_every == 0 or done == last)
            seen = {}
            if logs:
                seen = measure(learner, weights, context(step), batch, key)
            weights, state, metrics = train_step(
                learner, config, weights, state, context(step), batch, key
            )
            tokens_seen += int(texts.mask[rows].sum())
            stops = done < last and stop(done)
            if logs:
                values = {k: np.asarray(v) for k, v in (seen | metrics).items()}
                seconds = time.perf_counter() - began
                log(done, _scalars(values) | {"tokens_per_s": tokens_seen / seconds})
            saves = saves or (keeper and stops)
            if (logs or saves) and not np.isfinite(loss := float(metrics["loss"])):
                raise FloatingPointError(
                    f"the loss is {loss} at step {done}; lower learning_rate "
                    f"({config.learning_rate})."
                )
            if keeper and saves:
                keeper.save(done, weights, state)
            if stops:
                raise preemption.Stopped(f"stopped after step {done} of {config.steps}")
    return weights


def _learner(pretrained: Pretrained, drafter: Any, config: TrainConfig, mesh):
    """What is trained, the target's weights where they lie, and what a loss reads."""
    target = sharding.place(pretrained.params, mesh)
    shared = pretrained.target.shared(target)
    if base.joint(drafter) is None:
        return drafter, target, lambda step: shared
    learner = joint.Learner(drafter, pretrained.target)
    return (
        learner,
        target,
        lambda step: joint.Context(shared, target, jnp.float32(step / config.steps)),
    )


def _begin(learner: Any, config: TrainConfig, key, context, params, mesh):
    """Weights and optimiser before the first step, on the mesh."""
    if isinstance(learner, joint.Learner):
        params = learner.start(key, context.shared, context.target, params)
    elif params is None:
        params = jax.jit(learner.init)(key, context)
    copy = lambda x: jnp.array(x, jnp.float32)  # donated by every step
    weights = sharding.place(jax.tree.map(copy, params), mesh)
    init = config.optimiser().init
    if mesh is None:
        return weights, init(weights)
    split = sharding.shardings(jax.eval_shape(init, weights), mesh)
    return weights, jax.jit(init, out_shardings=split)(weights)


def _reader(target, params, drafter, texts: Texts, cache: FeatureCache | None, mesh):
    """The batch of given rows, features with it."""
    if cache is not None:
        return lambda rows: cache.batch(texts, rows, mesh)
    reads = {"kv_layers": base.kv_layers(drafter)}
    look = jax.jit(functools.partial(features, target, drafter.taps, **reads))

    def read(rows):
        shape = len(rows), texts.tokens.shape[1]
        load = lambda x: sharding.load(mesh, shape, lambda part: x[rows[part]])
        return look(params, load(texts.tokens), load(texts.mask))

    return read


def _scalars(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Flattens vectors to name_1, name_2, ... and adds the tau they promise."""
    flat = {}
    for name, value in values.items():
        if value.ndim == 0:
            flat[name] = float(value)
        else:
            flat |= {f"{name}_{i}": float(x) for i, x in enumerate(value, 1)}
    if "survival" in values:
        flat["tau"] = float(1 + np.sum(values["survival"]))
    return flat
