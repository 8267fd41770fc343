"""`specjax generate`: one answer, its tokens marked by fate."""

import dataclasses
import pathlib
import sys
from typing import Literal

from specjax.commands import common


@dataclasses.dataclass(frozen=True)
class Generate:
    """Answer one prompt; drafted tokens are marked as accepted or rejected."""

    prompt: str
    target: str = "tiny"
    drafter: str = ""  # name or folder; the first shipped one if empty, `none` for none
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    gamma: int | None = None
    tree: str | None = None  # FILE.json, or dynamic:NODES:DEPTH[:WIDTH]; else a chain
    rule: str | None = None  # None: the exact one that suits
    seed: int = 0
    raw: bool = False  # continue the prompt as it stands, without the chat template
    marks: Literal["auto", "colour", "brackets", "none"] = "auto"  # auto: by terminal
    json: pathlib.Path | None = None

    def run(self) -> None:
        import jax

        from specjax import checkpoints, console, joint, metrics, targets
        from specjax.drafters.none import NoDrafter
        from specjax.generate import Model, Weights, stream
        from specjax.sampling import Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        common.check_writable(self.json)
        common.check_rule(self.rule)
        common.check_seed(self.seed)
        pretrained = targets.load(self.target)
        tokenizer = pretrained.tokenizer
        sampling = dataclasses.replace(sampling, num_ids=tokenizer.vocab_size)
        chat = [{"role": "user", "content": self.prompt}]
        tokens = tokenizer.encode(self.prompt) if self.raw else tokenizer.chat(chat)
        shipped = checkpoints.shipped(self.target)
        spec = self.drafter or next(iter(shipped), "none")
        name, drafter, params = "none", NoDrafter(), None
        if spec == "none":
            flags = {"--gamma": self.gamma, "--tree": self.tree, "--rule": self.rule}
            for flag, value in flags.items():
                if value is not None:
                    raise ValueError(f"{flag} {value}: there is no drafter to use it.")
        else:
            name, drafter, params = common.load_drafter(spec, self.target, pretrained)
            pretrained = joint.tuned(pretrained, drafter, params)
            drafter = common.with_gamma(drafter, self.gamma)
            drafter = common.with_tree(drafter, self.tree)

        model = Model(
            pretrained.target, drafter, sampling, pretrained.stop_ids, self.rule
        )
        out = common.terminal(colour=self.marks == "colour")
        marks = self.marks
        if marks == "auto":
            marks = "colour" if out.is_terminal else "brackets"
        marker = console.Marker(tokenizer, out, "none" if name == "none" else marks)
        result = None
        for result in stream(
            model,
            Weights(pretrained.params, params),
            [tokens],
            max_new_tokens=self.max_new_tokens,
            key=jax.random.key(self.seed),
        ):
            marker.show(console.fates(result))
        assert result is not None
        marker.close()

        rounds = int(metrics.num_rounds(result.trace)[0])
        accepted = int(result.trace.num_accepted.sum())
        legend = "" if marks == "none" or name == "none" else _legend(marks)
        print(
            f"[{pretrained.name}, drafter {name}: {len(result.tokens[0])} tokens in "
            f"{rounds} rounds, {accepted} drafted tokens accepted, tau "
            f"{metrics.tau(result.trace):.2f}, ended by {result.finish_reasons[0]}"
            f"{legend}]",
            file=sys.stderr,
        )
        if self.json:
            stop = set(pretrained.stop_ids)
            text = tokenizer.decode([t for t in result.tokens[0] if t not in stop])
            console.write_json(
                self.json,
                {
                    "tokens": result.tokens[0],
                    "text": text,
                    "finish_reason": result.finish_reasons[0],
                    "rounds": rounds,
                    "accepted": accepted,
                },
            )


def _legend(marks: str) -> str:
    if marks == "colour":
        return "; green: accepted draft, red: rejected draft, bold: the target's own"
    return "; {accepted draft} ~rejected draft~, unmarked: the target's own"
