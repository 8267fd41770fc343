"""What verification costs beside the target pass that it judges.

    python benchmarks/verification.py            under a minute on 2 cores
    python benchmarks/verification.py --smoke    seconds, a random small model

For one sequence of N nodes: one target pass over them (a chain or a tree, behind a
committed context, logits of all nodes), and by turns in the same run each rule on such
logits, everything between logits and verdict included: temperature, softmax, tests,
residuals and the draw of the bonus. The share is of the round that the two make up.
The text is a chat prompt and the answer to it that the target likes best.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import timing
import tyro

from specjax import corpus, kv_cache, targets, testing, verify
from specjax.drafters.none import NoDrafter
from specjax.generate import Model, Weights, generate
from specjax.sampling import GREEDY, Sampling
from specjax.tree import Tree
from specjax.verify import Draft

TREE = Tree((-1, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 4, 5, 7, 10, 10))
SETTINGS = {
    "T=1": Sampling(),
    "T=0.7 top-p 0.9": Sampling(0.7, top_p=0.9),
    "T=0.7 top-k 50": Sampling(0.7, top_k=50),
}


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "smollm2-135m"  # a ready name, a folder or a hub id
    context: int = 128  # committed tokens
    repeats: int = 15
    seed: int = 0
    json: pathlib.Path | None = None
    smoke: bool = False


def main(config: Config) -> list[dict]:
    if config.smoke:
        target, params = testing.tiny_target(config.seed)
        config = dataclasses.replace(config, repeats=2, context=16)
        text = list(range(4))
    else:
        loaded = targets.load(config.target)
        target, params = loaded.target, loaded.params
        prompt = corpus.shipped_prompts("chat")["chat"][0]
        text = loaded.tokenizer.chat([{"role": "user", "content": prompt}])
    V = target.config.vocab_size
    text = text[: config.context]
    more = config.context + TREE.num_nodes - len(text)
    plain = Model(target, NoDrafter(), GREEDY)
    greedy = generate(plain, Weights(params, None), [text], max_new_tokens=more)
    text = jnp.asarray([[*text, *greedy.tokens[0]]], jnp.int32)
    prompt, nodes = text[:, : config.context], text[:, config.context :]
    size = -(-(config.context + 32) // 128) * 128
    cache = target(params, prompt, target.init_cache(1, size)).cache
    cache = kv_cache.commit(cache, None, jnp.array([config.context]))

    @jax.jit
    def run_pass(tokens, cache):
        shape = {"ancestors": TREE.ancestors, "depths": TREE.depths}
        out = target(params, tokens, cache, **shape)
        return target.logits(params, out.hidden), out.cache

    logits = run_pass(nodes, cache)[0]
    ways = {"pass": lambda: timing.timed(lambda: run_pass(nodes, cache))}
    for rule, label, drafting in _cases():
        ways[f"{rule} {label}"] = _judge(rule, label, drafting, logits, config)
    times = timing.by_turns(ways, config.repeats)
    rows = []
    for name, seconds in times.items():
        share = seconds / (seconds + times["pass"])
        rows.append(
            {
                "way": name,
                "ms": float(np.median(seconds) * 1e3),
                "share of a round %": None
                if name == "pass"
                else float(np.median(share) * 100),
            }
        )
    title = f"{config.target}: verification of {TREE.num_nodes} nodes, {V} ids"
    timing.report(title, rows, dataclasses.asdict(config), config.json)
    return rows


def _cases():
    yield "greedy", "T=0", GREEDY
    for label, sampling in SETTINGS.items():
        for rule in ("token", "block", "recursive", "traversal", "match"):
            yield rule, label, sampling


def _judge(rule, label, sampling, logits, config):
    chain = rule in ("token", "block", "greedy")
    tree = Tree.chain(TREE.num_nodes - 1) if chain else TREE
    V = logits.shape[-1]
    rows = [0] * len(tree.inner)
    # Drafts of a good drafter: drawn from the law of the first node.
    law = Sampling().probs(logits[:, rows])
    best = jax.lax.top_k(logits[:, 0], tree.num_nodes - 1)[1].astype(jnp.int32)
    draft = Draft(
        tokens=best % V,
        probs=law if verify.RULES.get(rule, verify.RULES["match"]).drawn else None,
    )
    used = verify.RULES.get(rule, verify.RULES["token"])

    @jax.jit
    def judge(draft, logits, keys):
        if not sampling.greedy:
            logits = sampling.scores(logits)
        one = lambda d, z, k: verify.verify(d, z, sampling, k, tree, used)
        return jax.vmap(one)(draft, logits, keys)

    keys = jax.random.split(jax.random.key(config.seed), 1)
    return lambda: timing.timed(lambda: judge(draft, logits, keys))


if __name__ == "__main__":
    main(tyro.cli(Config))
