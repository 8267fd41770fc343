"""What a training needs on a mesh that is not there: bytes a device, flops, hours.

The programs of a training step, and of a round of serving what comes out of it, are
compiled for as many devices as the mesh has, from shapes alone: no weight exists.
Arguments are counted as the compiler places them, and what it needs beside them is its
own figure for one device. The devices are faked ones of the CPU, or those of a TPU
topology where libtpu is installed. XLA for the CPU keeps copies in float32 of some
bfloat16 operands, orders a program less sparingly than for TPU or GPU, computes
nothing again and expands the products of experts: its figure is too high, of experts
many times.

Seconds are flops / (devices x peak x share), or bytes of weights over the bandwidth if
that is more; what the devices send one another is not in it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import drafters, feature_cache, generate, roofline, sharding, training
from specjax.drafters import base
from specjax.sampling import GREEDY
from specjax.sharding import MeshShape
from specjax.targets import convert
from specjax.targets.scanned import Scanned, arranged
from specjax.transformer import TransformerConfig
from specjax.work import Ends, count


@dataclasses.dataclass(frozen=True)
class Job:
    """A training, and how what it makes is to be served."""

    config: TransformerConfig  # of the target
    drafter: str  # registry name
    mesh: MeshShape
    batch_size: int = 8  # texts a step
    length: int = 2048  # tokens of a text
    tokens: float = 1e8  # of all texts
    epochs: int = 4
    remat: bool = False
    fields: tuple[tuple[str, Any], ...] = ()  # of the drafter, beside its defaults
    serve_batch: int = 8  # rows that are served together
    context: int = 4096  # tokens of a row in the cache
    chip: roofline.Chip = roofline.CHIPS["v5p"]
    compute_share: float = 0.5  # achieved of the chip's peak
    bandwidth_share: float = 0.7
    disk: float = 2e9  # bytes a second that features are read with, all hosts together

    def __post_init__(self):
        for name in ("batch_size", "length", "epochs", "serve_batch", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"a plan needs {name} >= 1, got {getattr(self, name)}")
        for name in ("tokens", "disk"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"a plan needs {name} > 0 and finite, got {getattr(self, name)}."
                )
        for name in ("compute_share", "bandwidth_share"):
            roofline.check_share(name, getattr(self, name))
        longest = max(self.length, self.context)
        if longest > self.config.max_positions:
            raise ValueError(
                f"{longest} tokens are more than the model's "
                f"{self.config.max_positions} positions; give fewer."
            )
        ways = self.mesh.data * self.mesh.fsdp
        if self.batch_size % ways and self.length % ways:
            raise ValueError(
                f"{self.batch_size} texts do not divide over data x fsdp = {ways}; "
                f"give a multiple of {ways}."
            )


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program: bytes on one device."""

    arguments: int  # what it is given
    temporary: int  # most that it holds beside arguments and results
    results: int  # less those that take an argument's place


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to bring the target's features to the drafter."""

    name: str
    storage: float  # bytes on disk
    memory: int  # bytes on a device
    hours: float
    fits: bool
    offered: bool = True  # False: for comparison, `specjax train` has it not


def on_device(tree: Any) -> int:
    """Bytes of arrays whose split is known, on one device."""
    part = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(part(x) for x in jax.tree.leaves(tree))


class Plan:
    """A job's programs, traced and compiled once. Raises ValueError if it cannot be."""

    def __init__(self, job: Job, devices: Sequence[Any] | None = None):
        devices = jax.devices() if devices is None else devices
        self.job, self.mesh = job, job.mesh.make(devices[: job.mesh.size])
        self.target = convert.target_of(job.config)
        mask = job.config.vocab_size - 1
        make = drafters.get(job.drafter).for_target
        self.drafter = make(job.config, mask, **dict(job.fields))
        if base.joint(self.drafter) is not None:
            raise ValueError(
                f"{job.drafter} trains the target too; plans are of frozen targets."
            )
        self.settings = training.TrainConfig(batch_size=job.batch_size, remat=job.remat)
        half = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
        start = jax.eval_shape(lambda: self.target.init(jax.random.key(0)))
        self.params = jax.tree.map(half, start)
        shared = jax.eval_shape(self.target.shared, start)
        self.draft_params = jax.eval_shape(
            lambda s: self.drafter.init(jax.random.key(0), s), shared
        )
        self.shared = jax.tree.map(half, shared)
        self.state = jax.eval_shape(self.settings.optimiser().init, self.draft_params)

    # ---- shapes on the mesh

    def _split(self, tree: Any) -> Any:
        at = sharding.shardings(tree, self.mesh)
        put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(put, tree, at)

    def _rows(self, tree: Any) -> Any:
        def put(x):
            split = sharding.rows(self.mesh, x.shape)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)

        return jax.tree.map(put, tree)

    def bytes(self, tree: Any) -> int:
        """Bytes of a tree of weights on one device."""
        return on_device(self._split(tree))

    def _texts(self):
        shape = self.job.batch_size, self.job.length
        ints = jax.ShapeDtypeStruct(shape, jnp.int32)
        return self._rows((ints, jax.ShapeDtypeStruct(shape, jnp.bool_)))

    # ---- programs

    @functools.cached_property
    def _look(self):
        stacked = base.reads_states_alone(self.drafter)
        target, params = arranged(self.target, stacked), self.params
        if isinstance(target, Scanned):
            params = jax.eval_shape(target.stack, params)
        look = functools.partial(
            feature_cache.features,
            target,
            self.drafter.taps,
            kv_layers=base.kv_layers(self.drafter),
        )
        return look, (self._split(params), *self._texts())

    @functools.cached_property
    def _step(self):
        look, args = self._look
        batch = self._rows(jax.eval_shape(look, *args))
        step = functools.partial(training.train_step, self.drafter, self.settings)
        key = jax.eval_shape(lambda: jax.random.key(0))
        shared = self._split(self.shared)
        return step, (
            self._split(self.draft_params),
            self._split(self.state),
            shared,
            batch,
            key,
        )

    def _compile(self, function, args, **options) -> Program:
        with sharding.use(self.mesh):
            whole = jax.jit(function, keep_unused=True, **options)
            found: Any = whole.lower(*args).compile().memory_analysis()
        return Program(
            found.argument_size_in_bytes,
            found.temp_size_in_bytes,
            found.output_size_in_bytes - found.alias_size_in_bytes,
        )

    @functools.cached_property
    def features(self) -> Program:
        """The frozen target over a batch of texts."""
        return self._compile(*self._look)

    @functools.cached_property
    def step(self) -> Program:
        """A step of the optimiser on features that are there."""
        return self._compile(*self._step, donate_argnums=(0, 1))

    @functools.cached_property
    def _serving(self):
        job, model = self.job, generate.Model(self.target, self.drafter, GREEDY)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        half = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
        weights = generate.Weights(
            self._split(self.params),
            self._split(jax.tree.map(half, self.draft_params)),
        )
        B, N = job.serve_batch, self.drafter.tree.num_nodes
        size = -(-(job.context + N + 2) // 128) * 128
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
        begin = functools.partial(
            generate.prefill, model, cache_size=size, max_new_tokens=64
        )
        progress = jax.eval_shape(begin, weights, ints(B, 32), ints(B), keys, ints(1))

        def put(x):
            axes = sharding.fit(sharding.row_axes(x, B), x.shape, self.mesh)
            split = jax.sharding.NamedSharding(self.mesh, axes)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)

        return model, weights, jax.tree.map(put, progress)

    @functools.cached_property
    def round(self) -> Program:
        """A round of draft, verify and commit of all rows that are served."""
        model, weights, progress = self._serving
        advance = functools.partial(generate.advance, model)
        count = jax.eval_shape(lambda: jnp.asarray(1, jnp.int32))
        return self._compile(advance, (weights, progress, count), donate_argnums=(1,))

    @property
    def cache_bytes(self) -> int:
        """The target's keys and values of the rows that are served, on one device."""
        _, _, progress = self._serving
        return on_device(progress.cache)

    # ---- time

    def _flops(self, function, args) -> float:
        whole = lambda weights, cache, *args: function(*args)
        with sharding.use(self.mesh):  # on which fewer things are computed again
            work = count(whole, Ends(set()), (), (), *args)
        return work.flops + work.cache_flops

    @functools.cached_property
    def flops(self) -> dict[str, float]:
        """Of one text token: the target's pass, and the drafter's step.

        With what a step computes again: `base.few_places`, P-EAGLE's segments, remat.
        """
        tokens = self.job.batch_size * self.job.length
        return {
            "target": self._flops(*self._look) / tokens,
            "drafter": self._flops(*self._step) / tokens,
        }

    def seconds(self, what: str) -> float:
        """Of a batch: "target" its features, "drafter" a step on them."""
        job = self.job
        flops = self.flops[what] * job.batch_size * job.length
        read = self.bytes(self.params if what == "target" else self.draft_params)
        return max(
            flops / (job.mesh.size * job.chip.flops * job.compute_share),
            read / (job.chip.bandwidth * job.bandwidth_share),
        )

    # ---- features

    def stored(self, dtype: str) -> float:
        """Bytes of features a token: taps and last state, of "logits" those too."""
        vectors = len(self.drafter.taps) + 1
        numbers = vectors * self.job.config.width
        cache = jax.eval_shape(lambda: self.target.init_cache(1, 2))
        for i in base.kv_layers(self.drafter):
            numbers += sum(x[i].shape[1] * x[i].shape[3] for x in (cache.k, cache.v))
        if dtype == "int8":
            return float(numbers + 4 * vectors)  # a scale each
        more = self.job.config.vocab_size if dtype == "logits" else 0
        return 2.0 * (numbers + more)

    def modes(self) -> list[Mode]:
        """The ways to bring features to the drafter, the recommended one first."""
        job = self.job
        steps = job.tokens / (job.batch_size * job.length)
        look, step = (self.seconds(x) * steps / 3600 for x in ("target", "drafter"))
        of = lambda p: p.arguments + p.temporary + p.results
        # The features are a result of the one and an argument of the other.
        both = of(self.features) + of(self.step) - on_device(self._step[1][3])
        alone = max(of(self.features), of(self.step))
        tokens_only = 4 * job.tokens
        found = [
            Mode(
                "on the fly",
                tokens_only,
                both,
                job.epochs * (look + step),
                both <= job.chip.memory,
            )
        ]
        for name, dtype in (
            ("cached, bfloat16", "bfloat16"),
            ("cached, int8", "int8"),
            ("cached with logits", "logits"),
        ):
            stored = self.stored(dtype) * job.tokens
            read = max(step, stored / job.disk / 3600)
            hours = look + job.epochs * read
            found.append(
                Mode(
                    name,
                    stored + tokens_only,
                    alone,
                    hours,
                    fits=alone <= job.chip.memory,
                    offered=dtype != "logits",
                )
            )
        usable = lambda m: m.fits and m.offered
        return sorted(found, key=lambda m: (not usable(m), m.hours, m.storage))
