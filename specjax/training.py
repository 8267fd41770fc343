"""One trainer for every drafter: a frozen target, the drafter's own loss, AdamW.

A step is a pure function of (parameters, optimiser state, step number): the batch and
the key are derived from the seed and the step, so a resumed run goes on exactly where
the first one stopped. Features come from the target on the fly, or from a cache on disk
when several epochs make the target's pass the larger cost.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from specjax import joint
from specjax.corpus import Texts
from specjax.drafters import base
from specjax.drafters.base import Batch
from specjax.targets.base import Pretrained, Target
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

    def __post_init__(self):
        for name in ("steps", "batch_size", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"training needs {name} >= 1, got {getattr(self, name)}."
                )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be > 0, got {self.learning_rate}.")

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


def features(target: Target, taps, params, tokens, mask, *, kv_layers=()) -> Batch:
    """Runs the frozen target over a batch."""
    (B, T), cache = tokens.shape, None
    if kv_layers:
        cache = target.init_cache(B, max(T, 2), params["embed"].dtype)
    out = target(params, tokens, cache, taps=taps)
    of = lambda i: tuple(x[:, :, :T] for x in (out.cache.k[i], out.cache.v[i]))
    return jax.lax.stop_gradient(
        Batch(tokens, mask, out.features, out.hidden, tuple(map(of, kv_layers)))
    )


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """Features of all texts on disk, bfloat16: the taps and the last state."""

    features: np.ndarray  # [X T MD] as uint16, a memory map
    hidden: np.ndarray  # [X T D]
    kv: tuple[tuple[np.ndarray, np.ndarray], ...] = ()  # [X K T E] of each `kv_layers`

    def batch(self, texts: Texts, index: np.ndarray) -> Batch:
        def read(x):
            return jnp.asarray(x[index].view(ml_dtypes.bfloat16), jnp.float32)

        return Batch(
            tokens=jnp.asarray(texts.tokens[index]),
            mask=jnp.asarray(texts.mask[index]),
            features=read(self.features),
            hidden=read(self.hidden),
            kv=tuple((read(k), read(v)) for k, v in self.kv),
        )


def _digest(tree: Any) -> str:
    """SHA-256 of all numbers in a tree."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _shapes(params: Params) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [f"{jax.tree_util.keystr(path)} {x.shape}" for path, x in leaves]


def cache_features(
    folder: str | pathlib.Path,
    pretrained: Pretrained,
    taps: tuple[int, ...],
    texts: Texts,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
    kv_layers: tuple[int, ...] = (),
) -> FeatureCache:
    """Opens the cache of exactly these texts, taps and target, or builds it."""
    folder = pathlib.Path(folder)
    X, T = texts.tokens.shape
    D = pretrained.target.config.width
    manifest = {
        "target": pretrained.name,
        "weights": _digest(pretrained.params),  # a name may outlive its weights
        "taps": list(taps),
        "texts": _digest(texts.tokens),
        "shape": [X, T, D],
    } | ({"kv_layers": list(kv_layers)} if kv_layers else {})
    if folder.exists():
        found = folder / "manifest.json"
        if not found.is_file() or found.read_text() != json.dumps(manifest):
            raise ValueError(
                f"{folder} is no feature cache of these texts and taps {taps} for "
                f"{pretrained.name}; name a new folder or delete it."
            )
        return _open_cache(folder, X, T, D, len(taps), len(kv_layers))

    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    run = jax.jit(
        functools.partial(features, pretrained.target, taps, kv_layers=kv_layers)
    )
    files: dict[str, np.memmap] = {}
    for start in range(0, X, batch_size):
        rows = np.minimum(np.arange(start, start + batch_size), X - 1)
        batch = run(pretrained.params, texts.tokens[rows], texts.mask[rows])
        for name, array in _arrays(batch.features, batch.hidden, batch.kv).items():
            narrow = np.asarray(array).astype(ml_dtypes.bfloat16).view(np.uint16)
            if name not in files:
                files[name] = np.lib.format.open_memmap(
                    beside / f"{name}.npy", "w+", np.uint16, (X, *narrow.shape[1:])
                )
            files[name][rows] = narrow
        progress(int(rows[-1]) + 1)
    for file in files.values():
        file.flush()
    (beside / "manifest.json").write_text(json.dumps(manifest))
    os.replace(beside, folder)
    return _open_cache(folder, X, T, D, len(taps), len(kv_layers))


def _arrays(features, hidden, kv) -> dict[str, Any]:
    """Names of a cache's files, and what they hold."""
    named = {"features": features, "hidden": hidden}
    for i, (k, v) in enumerate(kv):
        named |= {f"keys_{i}": k, f"values_{i}": v}
    return named


def _open_cache(folder, X, T, D, M, num_kv) -> FeatureCache:
    open_ = lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")
    try:
        stored, hidden = open_("features"), open_("hidden")
        whole = stored.shape == (X, T, M * D) and hidden.shape == (X, T, D)
        kv = tuple((open_(f"keys_{i}"), open_(f"values_{i}")) for i in range(num_kv))
        whole = whole and all(x.shape[::2] == (X, T) for pair in kv for x in pair)
    except (ValueError, EOFError, FileNotFoundError):  # cut short, empty or gone
        raise _damaged(folder) from None
    if not whole:
        raise _damaged(folder)
    return FeatureCache(stored, hidden, kv)


def _damaged(folder) -> ValueError:
    return ValueError(f"the feature cache in {folder} is damaged; delete it.")


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
    skipped = empty.astype(jnp.float32)
    return params, state, {"loss": value, "grad_norm": norm, "skipped": skipped}


@functools.partial(jax.jit, static_argnames=("drafter",))
def measure(drafter: Any, params: Params, shared, batch, key) -> dict[str, Array]:
    """What a drafter logs of a batch: a fifth of a step's time, so not every step."""
    return drafter.loss(params, shared, batch, key)[1]


class Checkpoints:
    """Parameters and optimiser state by step, through orbax."""

    def __init__(self, folder: pathlib.Path, about: dict[str, Any]):
        import orbax.checkpoint as ocp

        self.ocp, self.about = ocp, about
        self.manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True),
        )

    def save(self, step: int, params: Params, state: Any) -> None:
        tree = self.ocp.args.StandardSave({"params": params, "state": state})
        about = self.ocp.args.JsonSave(self.about)
        args = self.ocp.args.Composite(tree=tree, about=about)
        self.manager.save(step, args=args)

    def restore(self, params: Params, state: Any) -> tuple[int, Params, Any]:
        """The last step, or step 0 with what was given if there is none."""
        step = self.manager.latest_step()
        if step is None:
            return 0, params, state
        stored = self._read(step, about=self.ocp.args.JsonRestore())["about"]
        if stored != self.about:
            differ = [k for k in self.about if stored.get(k) != self.about[k]]
            raise ValueError(
                f"the checkpoint at step {step} was made with other settings "
                f"({', '.join(differ)}); use a new --out folder or the old settings."
            )
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            {"params": params, "state": state},
        )
        args = self.ocp.args.StandardRestore(abstract)
        tree = self._read(step, tree=args)["tree"]
        return step, tree["params"], tree["state"]

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self.manager.restore(step, args=self.ocp.args.Composite(**items))
        except (ValueError, KeyError, OSError) as error:
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"the checkpoint {self.manager.directory / str(step)} is damaged "
                f"({cause[:120]}); delete it to go on from the one before."
            ) from None

    def close(self) -> None:
        self.manager.wait_until_finished()
        self.manager.close()


def _about(pretrained, drafter, texts: Texts, config, weights) -> dict[str, Any]:
    """What a run must share with the one that left a checkpoint, to go on from it."""
    return {
        "drafter": type(drafter).__name__,
        "fields": json.loads(json.dumps(dataclasses.asdict(drafter))),
        "config": dataclasses.asdict(config),
        "texts": _digest((texts.tokens, texts.mask)),
        "target": pretrained.name,
        "weights": _digest(pretrained.params),
        "shapes": hashlib.sha256(str(_shapes(weights)).encode()).hexdigest(),
    }


def train(
    pretrained: Pretrained,
    drafter: Any,
    texts: Texts,
    config: TrainConfig = TrainConfig(),
    *,
    folder: str | pathlib.Path | None = None,
    params: Params | None = None,
    cache: FeatureCache | None = None,
    log: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    stop_after: int | None = None,
) -> Params:
    """Trains a drafter and returns its parameters.

    Args:
      folder: checkpoints go to its `checkpoints/`, and a run found there goes on.
      params: a warm start; None initialises by the drafter's own rule. A drafter that
        is trained together with its target (`joint`) gets an adapter if it has none.
      log: called every `log_every` steps with loss, alpha by position, tau, tokens/s.
      stop_after: ends early at this step with a checkpoint, as a killed run would.
    """
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    shared = pretrained.target.shared(pretrained.params)
    learner, context = drafter, lambda step: shared
    if base.joint(drafter) is not None:
        learner = joint.Learner(drafter, pretrained.target)
        params = learner.start(init_key, shared, pretrained.params, params)
        context = lambda step: joint.Context(
            shared, pretrained.params, jnp.float32(step / config.steps)
        )
    if params is None:
        params = jax.jit(drafter.init)(init_key, shared)
    copy = lambda x: jnp.array(x, jnp.float32)  # donated below
    weights = jax.tree.map(copy, params)
    state = config.optimiser().init(weights)

    reads = {"kv_layers": base.kv_layers(drafter)}
    look = jax.jit(
        functools.partial(features, pretrained.target, drafter.taps, **reads)
    )
    keeper, first = None, 0
    last = min(config.steps, stop_after or config.steps)
    with contextlib.ExitStack() as stack:
        if folder is not None:
            about = _about(pretrained, drafter, texts, config, weights)
            keeper = Checkpoints(pathlib.Path(folder) / "checkpoints", about)
            stack.callback(keeper.close)
            first, weights, state = keeper.restore(weights, state)

        began, tokens_seen = time.perf_counter(), 0
        for step in range(first, last):
            rows = texts.batch(step, config.batch_size, config.seed)
            if cache is not None:
                batch = cache.batch(texts, rows)
            else:
                batch = look(pretrained.params, texts.tokens[rows], texts.mask[rows])
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
            if logs:
                values = {k: np.asarray(v) for k, v in (seen | metrics).items()}
                seconds = time.perf_counter() - began
                log(done, _scalars(values) | {"tokens_per_s": tokens_seen / seconds})
            if (logs or saves) and not np.isfinite(loss := float(metrics["loss"])):
                raise FloatingPointError(
                    f"the loss is {loss} at step {done}; lower learning_rate "
                    f"({config.learning_rate})."
                )
            if keeper and saves:
                keeper.save(done, weights, state)
    return weights


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
