"""The main job: what each drafter is worth on a target, measured.

For every drafter, task and temperature the same held-out prompts are decoded with the
drafter and by the plain loop of the same engine. With t the time of a plain round (one
pass of one token), all read in one run on one machine:

    verify_ratio v  time of a round of N nodes whose draft costs nothing, over t
    draft_cost c    time that the drafter adds to that round (draft and commit), over t
    predicted       tau / (v + c)
    measured        tokens per second with the drafter over tokens per second without

Prefill is outside all of them: both sides pay it alike.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import joint, metrics
from specjax.certify import engine
from specjax.drafters.base import Draft
from specjax.drafters.none import NoDrafter
from specjax.generate import (
    Generation,
    Model,
    Weights,
    advance,
    autoregressive,
    finish,
    start,
)
from specjax.metrics import Trace
from specjax.sampling import Sampling
from specjax.targets.base import Pretrained
from specjax.testing import FALSE_ALARM
from specjax.tree import DynamicTree, Tree

TIE = 1e-3  # logits closer than this may swap between passes of different width


@dataclasses.dataclass(frozen=True)
class FreeDrafter(NoDrafter):
    """Proposes the anchor G times at no cost: a round with it is the verify pass."""

    tree: Tree | DynamicTree = dataclasses.field(default=Tree.chain(1))

    def draft(self, params, shared, state, anchor, sampling, keys):
        del params, sampling, keys
        (B,), N = anchor.shape, self.tree.num_nodes
        tokens = jnp.repeat(anchor[:, None], N - 1, axis=1)
        if isinstance(self.tree, DynamicTree):  # a chain as far as it may reach
            chain = jnp.minimum(
                jnp.arange(-1, N - 1, dtype=jnp.int32), self.tree.depth - 1
            )
            return Draft(tokens, None, jnp.broadcast_to(chain, (B, N))), state
        probs = jax.nn.one_hot(tokens[:, : len(self.tree.inner)], shared.head.shape[0])
        return Draft(tokens=tokens, probs=probs), state


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to decode and how; part of the result."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 8  # a task
    max_new_tokens: int = 96
    batch_size: int = 1
    seed: int = 0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    rule: str | None = None  # of `verify.RULES`; None: the exact one that suits
    timing_rounds: int = 48  # rounds a repeat of the cost measurement
    timing_repeats: int = 9

    def __post_init__(self):
        for name in ("num_prompts", "max_new_tokens", "batch_size", "timing_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench needs {name} >= 1, got {getattr(self, name)}.")

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, self.top_k, self.top_p, self.min_p)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of a round."""

    plain: float  # no drafter
    verify: float  # N nodes, free draft
    whole: float  # with the drafter

    @property
    def verify_ratio(self) -> float:
        return self.verify / self.plain

    @property
    def draft_cost(self) -> float:
        return max(0.0, self.whole - self.verify) / self.plain


@dataclasses.dataclass(frozen=True)
class Run:
    """One way of decoding all prompts of a task."""

    generations: list[Generation]  # one a batch
    seconds: float  # rounds alone, prefill left out

    @property
    def tokens(self) -> list[list[int]]:
        return [row for g in self.generations for row in g.tokens]

    @property
    def trace(self) -> Trace:
        """All rows beside each other, padded to the longest run."""
        traces = [g.trace for g in self.generations]
        R = max(t.num_accepted.shape[1] for t in traces)

        def pad(x):
            space = [(0, 0), (0, R - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
            return np.pad(x, space)

        return jax.tree.map(lambda *xs: np.concatenate([pad(x) for x in xs]), *traces)

    @property
    def tokens_per_second(self) -> float:
        return float(self.trace.num_committed.sum()) / self.seconds


class Bench:
    """Times one target; holds what all of its rows share."""

    def __init__(
        self,
        pretrained: Pretrained,
        tasks: dict[str, Sequence[str]],
        settings: Settings,
    ):
        self.pretrained, self.settings = pretrained, settings
        tokenizer = pretrained.tokenizer
        self.tasks = {
            task: [tokenizer.chat([{"role": "user", "content": p}]) for p in prompts]
            for task, prompts in tasks.items()
        }
        every = [p for prompts in self.tasks.values() for p in prompts]
        longest = max(map(len, every))
        room = pretrained.target.config.max_positions - longest
        if room < settings.max_new_tokens:
            raise ValueError(
                f"the longest prompt has {longest} tokens and leaves {max(room, 0)} of "
                f"the target's {pretrained.target.config.max_positions} positions; "
                f"max_new_tokens={settings.max_new_tokens} does not fit."
            )
        self.width = -(-longest // 32) * 32  # one prompt shape: compiled once
        needed = max(self.width, longest + settings.max_new_tokens) + 32
        self.cache_size = -(-needed // 128) * 128
        self.verify_ratios: dict[tuple[Tree | DynamicTree, float], float] = {}
        self.compiled: set[tuple[Model, int]] = set()  # models, with rows

    def on_target_of(self, drafter: Any, params: Any) -> "Bench":
        """The same on the target that a drafter was trained with; itself for most."""
        own = copy.copy(self)
        own.pretrained = joint.tuned(self.pretrained, drafter, params)
        return own

    def model(self, drafter: Any, temperature: float) -> Model:
        sampling = self.settings.sampling(temperature)
        num_ids = self.pretrained.tokenizer.vocab_size
        return Model(
            self.pretrained.target,
            drafter,
            dataclasses.replace(sampling, num_ids=num_ids),
            self.pretrained.stop_ids,
            None if isinstance(drafter, NoDrafter) else self.settings.rule,
        )

    def batches(self, task: str) -> list[list[list[int]]]:
        prompts, size = self.tasks[task], self.settings.batch_size
        return [prompts[i : i + size] for i in range(0, len(prompts), size)]

    def start(self, model: Model, weights: Weights, prompts, offset: int):
        return start(
            model,
            weights,
            prompts,
            max_new_tokens=self.settings.max_new_tokens,
            key=jax.random.key(self.settings.seed),
            seeds=[offset + i for i in range(len(prompts))],
            cache_size=self.cache_size,
            width=self.width,
        )

    def decode(self, model: Model, weights: Weights, prompts, offset: int):
        """Decodes one batch; returns it with the seconds its rounds took."""
        progress = jax.block_until_ready(self.start(model, weights, prompts, offset))
        began = time.perf_counter()
        everything = jnp.asarray(self.settings.max_new_tokens)
        progress = jax.block_until_ready(advance(model, weights, progress, everything))
        return finish(model, progress), time.perf_counter() - began

    def paired(self, model: Model, weights: Weights, task: str) -> tuple[Run, Run]:
        """Decodes a task with the drafter and without, batch by batch in turn.

        What else the machine does meanwhile then falls on both alike.
        """
        plain_weights = Weights(self.pretrained.params, None)
        ways = ((model, weights), (autoregressive(model), plain_weights))
        batches = self.batches(task)
        for shape in {len(b): b for b in batches}.values():
            for way in ways:  # compile outside the timing
                if (way[0], len(shape)) not in self.compiled:
                    self.compiled.add((way[0], len(shape)))
                    self.decode(*way, shape, 0)
        done, offset = [], 0
        for prompts in batches:
            done.append([self.decode(*way, prompts, offset) for way in ways])
            offset += len(prompts)
        drafted, plain = (
            Run([g for g, _ in results], sum(s for _, s in results))
            for results in zip(*done, strict=True)
        )
        return drafted, plain

    def seconds_per_round(self, model: Model, weights: Weights, prompts) -> float:
        """Time of rounds that never end a row, without that of the call."""
        never = tuple(-2 for _ in model.stop_ids)  # of the same shape: compiled once
        endless = dataclasses.replace(model, stop_ids=never)
        rounds = min(
            self.settings.timing_rounds,
            max(1, (self.settings.max_new_tokens - 1) // model.drafter.tree.num_nodes),
        )
        run = lambda progress, many: jax.block_until_ready(
            advance(endless, weights, progress, jnp.asarray(many))
        )
        warm = min(1, rounds - 1)  # the first round finds its weights in no cache
        progress = run(self.start(endless, weights, prompts, 0), warm)
        self.compiled.add((model, len(prompts)))
        began = time.perf_counter()
        progress = run(progress, 0)
        ready = time.perf_counter()  # what a call takes, whatever it runs
        progress = run(progress, rounds - warm)
        ended = time.perf_counter()
        ran = int(progress.num_rounds) - warm
        return max(ended - ready - (ready - began), 1e-9) / ran

    def costs(self, drafter: Any, params: Any, temperature: float) -> Costs:
        """Seconds of a round with a drafter, beside the plain one of this moment.

        In each repeat the plain round runs right beside the others: what is kept is the
        median ratio to it, which a machine that turns slower meanwhile does not move.
        The verify pass knows no drafter: its ratio is measured so once for a tree and
        temperature, beside the first drafter that has them, and the others share it.
        """
        at = drafter.tree, temperature
        kinds = [(NoDrafter(), None), (drafter, params)]
        if at not in self.verify_ratios:
            kinds.append((FreeDrafter(tree=drafter.tree), None))
        prompts = self.batches(next(iter(self.tasks)))[0]
        target = self.pretrained.params
        times = [
            [
                self.seconds_per_round(
                    self.model(kind, temperature), Weights(target, weights), prompts
                )
                for kind, weights in kinds
            ]
            for _ in range(self.settings.timing_repeats + 1)
        ]
        seconds = np.array(times[1:])  # the first one compiles
        plain = float(np.median(seconds[:, 0]))
        ratios = np.median(seconds / seconds[:, :1], axis=0)
        verify = self.verify_ratios.setdefault(at, float(ratios[-1]))
        return Costs(plain, plain * verify, plain * float(ratios[1]))

    def rows(
        self,
        name: str,
        drafter: Any,
        params: Any,
        temperature: float,
        lossless: Callable[[str, float], bool],
        tick: Callable[[str], None] = lambda what: None,
    ) -> list[dict[str, Any]]:
        """All tasks of one drafter at one temperature."""
        model = self.model(drafter, temperature)
        weights = Weights(self.pretrained.params, params)
        tick(f"{name} costs T={temperature:g}")
        costs = self.costs(drafter, params, temperature)
        rows = []
        for task in self.tasks:
            tick(f"{name} {task} T={temperature:g}")
            run, plain = self.paired(model, weights, task)
            tau = metrics.tau(run.trace)
            low, high = metrics.bootstrap_tau(run.trace, self.settings.seed)
            same = (
                self.same_text(plain.tokens, run.tokens, task)
                if model.sampling.greedy
                else lossless(name, temperature)
            )
            rows.append(
                {
                    "drafter": name,
                    "task": task,
                    "temperature": temperature,
                    "gamma": drafter.tree.depth,
                    "nodes": drafter.tree.num_nodes,
                    "rule": "greedy" if model.sampling.greedy else model.rule_name,
                    "rounds": int(metrics.num_rounds(run.trace).sum()),
                    "tokens": int(run.trace.num_committed.sum()),
                    "tau": tau,
                    "tau_low": low,
                    "tau_high": high,
                    "alpha_by_position": metrics.alpha_by_position(run.trace),
                    "draft_cost": costs.draft_cost,
                    "verify_ratio": costs.verify_ratio,
                    "speedup_predicted": metrics.speedup(
                        tau, costs.draft_cost, costs.verify_ratio
                    ),
                    "speedup_measured": run.tokens_per_second / plain.tokens_per_second,
                    "lossless": bool(same),
                }
            )
        return rows

    def keeps_the_law(self, name: str, drafter, params, temperature: float) -> bool:
        """Two tests at a false-alarm rate of 1e-6 each.

        The engine with a small drafter of this kind and rule against an enumerated law
        (`certify.engine.sampled`), and this very drafter on this target: that it draws
        its tokens from the laws it carries, on which exactness rests.
        """
        model = self.model(drafter, temperature)
        certificate = engine.sampled(
            name,
            model.sampling,
            rule=model.rule_name,
            topology=engine.kind(drafter.tree),
        )
        drawn = engine.drawn_p_value(
            drafter,
            params,
            self.pretrained.target,
            self.pretrained.params,
            next(iter(self.tasks.values()))[0],
            model.drafting,
        )
        return certificate.passed and drawn >= FALSE_ALARM

    def same_text(self, plain, drafted, task: str) -> bool:
        """Greedy text is the baseline's; a true tie of the target may go either way.

        Passes of different width round differently, so where the texts part the two
        tokens must both be within `TIE` of the target's largest logit.
        """
        return all(
            self._agree(prompt, a, b)
            for prompt, a, b in zip(self.tasks[task], plain, drafted, strict=False)
        )

    def _agree(self, prompt: list[int], a: list[int], b: list[int]) -> bool:
        if a == b:
            return True
        same = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None
        )
        if same is None:
            return False  # one is a prefix of the other: an end was missed
        target, params = self.pretrained.target, self.pretrained.params
        tokens = jnp.asarray([prompt + a[:same]])
        logits = target.logits(params, target(params, tokens).hidden[0, -1])
        best = float(jnp.max(logits))
        return bool(best - float(logits[a[same]]) < TIE > best - float(logits[b[same]]))
