"""What a cheaper output head costs in acceptance, and what it saves.

The head is most of a small drafter: 87 % of the bytes of Gemma 4's E2B drafter. Three
heads of one trained `gemma4_mtp`: the whole table; the ids that are most frequent in
the training texts (EAGLE-3's draft vocabulary, FR-Spec arXiv:2502.14856); the clusters
that score best for each state (Gemma 4's, `clustered_head.py`), with the centroids
trained or left as the means of their rows. Measured on what the target itself writes to
held-out prompts: how often its likeliest token can be drafted at all (recall), its mass
on such tokens, alpha by position, and tau of real rounds. `ms` is the head alone at
E2B's shape (262,144 ids of width 256, bfloat16, one row) with the same share of the
ids, on the machine at hand; the best of some runs.

Of Gemma 4's head no number is public. FR-Spec reports 1.12x over EAGLE-2 with a quarter
of the ids, VocabTrim (arXiv:2506.22694) 1 to 5 % fewer tokens a round.

    python experiments/output_heads.py        13 minutes on 2 cores with others beside
"""

import dataclasses
import functools
import pathlib
import time

import common
import jax
import jax.numpy as jnp
import numpy as np

from specjax import (
    clustered_head,
    corpus,
    draft_vocab,
    feature_cache,
    figures,
    metrics,
    targets,
    training,
)
from specjax.drafters import gemma4_mtp
from specjax.drafters.gemma4_mtp import Gemma4MTP
from specjax.generate import Model, Weights, generate
from specjax.layers import dense
from specjax.sampling import Sampling

SMOKE = {
    "self_prompts": 16,
    "length": 64,
    "steps": 2,
    "num_clusters": 16,
    "scored": (2,),
    "vocabularies": (512,),
    "tasks": ("code",),
    "num_prompts": 1,
    "max_new_tokens": 24,
    "temperatures": (1.0,),
    "ids_timed": 1024,
    "repeats": 1,
}


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    self_prompts: int = 512  # chats that the target writes to train centroids on
    length: int = 128  # tokens of a text
    steps: int = 200  # for the centroids
    num_clusters: int = 64
    scored: tuple[int, ...] = (1, 2, 4, 8, 16)  # clusters
    vocabularies: tuple[int, ...] = (1024, 512, 256, 128)  # ids
    tasks: tuple[str, ...] = ("code", "math", "chat")
    num_prompts: int = 12  # a task
    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    ids_timed: int = 262_144
    repeats: int = 20
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Subset(Gemma4MTP):
    """A drafter that scores the same few ids everywhere."""

    ids: tuple[int, ...] = ()

    def logits(self, params, z):
        ids = np.array(self.ids)
        few = dense(z, params["head"][ids], jnp.float32)
        return draft_vocab.spread(few, ids, self.config.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def judge(drafter, params, shared, batch):
    """Recall of the likeliest token, and mass, at step 1; alpha by position."""
    z = drafter.states(params, shared, batch, 1)[0]
    scored = jnp.isfinite(drafter.logits(params, z))[:, :-1]
    p = jax.nn.softmax(shared.logits(batch.hidden), axis=-1)[:, 1:]
    wanted = jnp.pad(batch.mask[:, 2:], ((0, 0), (0, 1)))
    mean = lambda x: jnp.sum(jnp.where(wanted, x, 0.0)) / jnp.sum(wanted)
    best = jnp.take_along_axis(scored, jnp.argmax(p, axis=-1)[..., None], axis=-1)
    _, logs = drafter.loss(params, shared, batch, jax.random.key(0))
    mass = jnp.sum(jnp.where(scored, p, 0.0), axis=-1)
    return mean(best[..., 0].astype(jnp.float32)), mean(mass), logs["alpha"]


def time_head(config: Config, kind: str, share: float) -> float:
    """Milliseconds of a head at E2B's shape with so large a share of the ids."""
    V, D, C = config.ids_timed, 256, config.num_clusters
    key = jax.random.key(0)
    table = jax.random.normal(key, (V, D), jnp.bfloat16)
    z = jax.random.normal(key, (1, D), jnp.bfloat16)
    order = jax.random.permutation(key, V).reshape(C, -1).astype(jnp.int32)

    def parted(z, table):
        # Scores of the scored alone: nothing of width V is made.
        clusters = table.reshape(C, -1, D)
        return clustered_head.score(z, table[:C], clusters, order, round(share * C))

    args = z, table[: V if kind == "clusters" else round(share * V)]
    run = jax.jit(parted if kind == "clusters" else dense)
    jax.block_until_ready(run(*args))
    best = float("inf")
    for _ in range(config.repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def heads(config: Config, pretrained, drafter, params, texts):
    """(kind, ids scored, drafter, parameters) of every head."""
    V, C = drafter.config.vocab_size, config.num_clusters
    yield "whole table", V, drafter, params
    counts = np.bincount(texts.tokens[texts.mask], minlength=V)
    fields = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
    for size in config.vocabularies:
        ids = tuple(draft_vocab.most_frequent(counts, size).tolist())
        yield "frequent ids", size, Subset(**fields, ids=ids), params
    parted, means = gemma4_mtp.with_clusters(drafter, params, C, min(config.scored))
    settings = training.TrainConfig(steps=config.steps, seed=config.seed)
    trained = training.train(pretrained, parted, texts, settings, params=means)
    for name, weights in (("clusters", trained), ("clusters, means", means)):
        for scored in config.scored:
            with_ = dataclasses.replace(parted, num_scored=scored)
            yield name, scored * V // C, with_, weights


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    name = "gemma4_mtp"
    loaded = common.load_drafters((name,), config.target, pretrained)
    drafter, params = loaded[name]
    own = corpus.self_made(pretrained, config.self_prompts, config.seed, config.length)
    texts = corpus.pack(own, config.length)
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    asked = [p for ps in tasks.values() for p in ps]
    answers = corpus.answer(
        pretrained,
        asked,
        temperature=1.0,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
    )
    held_out = corpus.pack(answers, config.length)
    look = functools.partial(feature_cache.features, pretrained.target, drafter.taps)
    args = pretrained.params, held_out.tokens, held_out.mask
    batch = jax.jit(functools.partial(look, kv_layers=drafter.kv_layers))(*args)
    shared = pretrained.target.shared(pretrained.params)
    chats = [[{"role": "user", "content": p}] for p in asked]
    prompts = [pretrained.tokenizer.chat(chat) for chat in chats]
    rows, times = [], {}
    for name, scored, variant, weights in heads(
        config, pretrained, drafter, params, texts
    ):
        recall, mass, alpha = judge(variant, weights, shared, batch)
        kind, share = name.split(" ")[0].strip(","), scored / drafter.config.vocab_size
        kind = {"frequent": "ids"}.get(kind, kind)
        if (kind, share) not in times:
            times[kind, share] = time_head(config, kind, share)
        row = {
            "head": name,
            "ids": scored,
            "recall": float(recall),
            "mass": float(mass),
            "alpha": np.asarray(alpha).tolist(),
            "ms": times[kind, share],
        }
        for t in config.temperatures:
            model = Model(pretrained.target, variant, Sampling(t), pretrained.stop_ids)
            run = generate(
                model,
                Weights(pretrained.params, weights),
                prompts,
                max_new_tokens=config.max_new_tokens,
                key=jax.random.key(config.seed),
            )
            row[f"tau_T{t:g}"] = metrics.tau(run.trace)
        rows.append(row)
    return rows


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """alpha of the first token against the ids scored."""
    plt = figures.pyplot()
    fig, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for name in dict.fromkeys(r["head"] for r in rows):
        own = [r for r in rows if r["head"] == name]
        if len(own) == 1:
            axis.axhline(own[0]["alpha"][0], color="0.5", lw=1, ls="--", label=name)
        else:
            points = [r["ids"] for r in own], [r["alpha"][0] for r in own]
            axis.plot(*points, "o-", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("ids scored")
    axis.set_ylabel("acceptance of the first token")
    axis.legend(frameon=False)
    fig.savefig(path, dpi=150)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
