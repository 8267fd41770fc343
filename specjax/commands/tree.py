"""`specjax tree`: the sparse tree that suits a drafter, from measured acceptance."""

import dataclasses
import pathlib
from typing import Literal

from tyro.conf import Positional

from specjax.commands import common


@dataclasses.dataclass(frozen=True)
class FindTree:
    """Find the draft tree that keeps most tokens: `--tree` of bench and generate."""

    drafter: Positional[str]  # name or folder
    out: pathlib.Path  # the tree goes here, as JSON
    target: str = "tiny"
    nodes: int = 16  # of a round, the anchor included
    ranks: int = 10  # guesses looked at under each node
    # paths that came together, or the product of each depth's rates (Medusa's search)
    search: Literal["observed", "product"] = "observed"
    tasks: str = "code,math,chat"  # of the shipped prompts
    num_prompts: int = 16  # a task; half are for the search, half judge its tree
    max_new_tokens: int = 96

    def run(self) -> None:
        from specjax import corpus, joint, search, targets, tree

        common.check_writable(self.out, "--out")
        common.check_range("--nodes", self.nodes, 2)
        common.check_range("--ranks", self.ranks, 1)
        common.check_range("--num-prompts", self.num_prompts, 2)
        common.check_range("--max-new-tokens", self.max_new_tokens, 2)
        common.names_in("--tasks", self.tasks)
        pretrained = targets.load(self.target)
        name, drafter, params = common.load_drafter(
            self.drafter, self.target, pretrained
        )
        pretrained = joint.tuned(pretrained, drafter, params)
        tokenizer = pretrained.tokenizer
        halves = [], []
        for task, prompts in corpus.shipped_prompts(self.tasks).items():
            del task
            measured = corpus.spread(prompts, 8)  # by `specjax bench`: keep them out
            rest = [p for p in prompts if p not in measured]
            for i, prompt in enumerate(corpus.spread(rest, self.num_prompts)):
                chat = [{"role": "user", "content": prompt}]
                halves[i % 2].append(tokenizer.chat(chat))
        seen, held = (
            search.measure_ranks(
                pretrained, drafter, params, half, max_new_tokens=self.max_new_tokens
            )
            for half in halves
        )
        if not len(seen) or not len(held):
            raise ValueError(
                f"no round stands {seen.shape[1]} tokens before the end of its text; "
                f"raise --max-new-tokens {self.max_new_tokens} or --num-prompts "
                f"{self.num_prompts}."
            )
        product = tree.best_tree(tree.rank_rates(seen, self.ranks), self.nodes)
        observed = tree.best_observed_tree(seen, self.nodes, self.ranks)
        chosen = observed if self.search == "observed" else product
        depth = min(seen.shape[1], self.nodes - 1)
        shapes = {
            f"chain of {depth}": tree.Tree.chain(depth),
            f"product of rates, {self.nodes} nodes": product,
            f"observed paths, {self.nodes} nodes": observed,
        }
        out = common.terminal()
        out.print(
            f"{len(seen)} rounds for the search, {len(held)} held out; greedy tau"
        )
        for label, shape in shapes.items():
            out.print(
                f"  {label:<32} searched {tree.expected_tau(shape, seen):.2f}  "
                f"held out {tree.expected_tau(shape, held):.2f}"
            )
        chosen.save(
            self.out,
            drafter=name,
            target=pretrained.name,
            search=self.search,
            rounds=len(seen),
            tau_held_out=round(tree.expected_tau(chosen, held), 4),
        )
        out.print(
            f"wrote {self.out}; measure it: specjax bench --target {self.target} "
            f"--drafters {self.drafter} --tree {self.out}"
        )
