"""Is DSpark's confidence as sure as it should be, before and after temperatures?

Rounds of the engine on half of the prompts give the temperatures (sequential scaling,
`specjax.calibration`), those on the other half are judged: of each position k the
expected calibration error of "the first k drafts are all accepted", its AUC and Brier
score. Intervals are 95 % bootstraps over prompts, `gain` is the error before minus the
error after on the same resamples. `said` is the mean of what was promised, `was` the
share that came true: their ratio at the last position is what errors multiply to. A
round that the end of the text cut is left out.

Beside ours stands the paper's figure 6: Qwen3-4B on Alpaca, seven drafts.

    python experiments/calibration.py                 about two minutes on 2 cores
    python experiments/calibration.py --write FOLDER  a drafter's folder gets them
"""

import dataclasses
import functools
import json
import pathlib

import common
import jax
import jax.numpy as jnp
import numpy as np

from specjax import calibration, figures, targets
from specjax import generate as engine
from specjax.generate import Model, Weights
from specjax.sampling import Sampling

SMOKE = {"tasks": ("code",), "num_prompts": 4, "max_new_tokens": 12, "resamples": 20}
PAPER = [
    {"k": 1, "ece": 0.057, "ece_scaled": 0.020, "auc": 0.818},
    {"k": 3, "ece": 0.082, "ece_scaled": 0.017, "auc": 0.812},
    {"k": 5, "ece": 0.058, "ece_scaled": 0.008, "auc": 0.864},
    {"k": 7, "ece": 0.033, "ece_scaled": 0.004, "auc": 0.907},
]
HIDDEN = ("bins", "bins_scaled", "brier", "brier_scaled", "fitted_on")
SHOWN = 4  # positions in the figure


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafter: str = "dspark"  # name or folder
    tasks: tuple[str, ...] = ("code", "math", "chat")
    temperature: float = 1.0
    num_prompts: int = 60  # a task; every second one is judged
    max_new_tokens: int = 96
    resamples: int = 500
    seed: int = 0
    write: pathlib.Path | None = None  # a drafter's folder that gets the temperatures


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Rounds whose drafts were verified whole."""

    logits: np.ndarray  # [X G] confidence before the sigmoid
    accepted: np.ndarray  # [X]
    prompt: np.ndarray  # [X]

    def of(self, prompts: np.ndarray) -> "Rounds":
        """The rounds of these prompts, as often as each is named."""
        at = [np.flatnonzero(self.prompt == p) for p in prompts]
        at = np.concatenate(at) if len(at) else np.zeros(0, int)
        return Rounds(self.logits[at], self.accepted[at], self.prompt[at])


@functools.partial(jax.jit, static_argnames=("model",))
def look(model: Model, weights: Weights, progress: engine.Progress):
    """Tokens and confidence of the draft that the coming round will make."""
    draft, _ = engine.propose(model, weights, progress)
    return draft.tokens, draft.confidence


def collect(config: Config, model: Model, weights: Weights, prompts) -> Rounds:
    """Runs the engine to the end, a round at a time."""
    progress = engine.start(
        model,
        weights,
        prompts,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
    )
    said = []
    while np.any(np.asarray(progress.reason) == engine.RUNNING):
        said.append(jax.tree.map(np.asarray, look(model, weights, progress)))
        progress = engine.advance(model, weights, progress, jnp.asarray(1))
    trace = engine.finish(model, progress).trace
    tokens, sure = (np.stack(x, axis=1) for x in zip(*said, strict=True))  # [B R G]
    ran = trace.num_committed > 0
    assert np.array_equal(tokens[ran], trace.drafted[ran])
    # A round whose first refused draft is known, or that has none.
    accepted = np.asarray(trace.num_accepted)
    whole = ran & (trace.rejected | (trace.num_committed > trace.depth))
    row = np.broadcast_to(np.arange(len(prompts))[:, None], whole.shape)
    p = np.clip(sure[whole].astype(np.float64), 1e-7, 1 - 1e-7)
    return Rounds(np.log(p / (1 - p)), accepted[whole], row[whole])


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    chosen = common.load_drafters((config.drafter,), config.target, pretrained)
    drafter, params = next(iter(chosen.values()))
    drafter = dataclasses.replace(drafter, temperatures=None)
    sampling = Sampling(config.temperature)
    model = Model(pretrained.target, drafter, sampling, pretrained.stop_ids)
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    chats = [[{"role": "user", "content": p}] for task in tasks.values() for p in task]
    prompts = [pretrained.tokenizer.chat(chat) for chat in chats]
    rounds = collect(config, model, Weights(pretrained.params, params), prompts)
    fitted = rounds.of(np.arange(0, len(prompts), 2))
    judged = np.arange(1, len(prompts), 2)
    temperatures = calibration.fit(fitted.logits, fitted.accepted)
    if config.write is not None:
        path = config.write / "drafter.json"
        stored = json.loads(path.read_text())
        stored["config"]["temperatures"] = list(temperatures)
        path.write_text(json.dumps(stored, indent=2) + "\n")
    return summary(config, rounds, judged, temperatures, len(fitted.accepted))


def errors(rounds: Rounds, temperatures) -> tuple[np.ndarray, np.ndarray]:
    """Calibration error of each position before and after, [G] each."""
    labels = calibration.survived(rounds.accepted, rounds.logits.shape[1])
    both = []
    for T in (None, temperatures):
        p = calibration.prefixes(rounds.logits, T)
        both.append([calibration.ece(a, b) for a, b in zip(p.T, labels.T, strict=True)])
    return np.array(both[0]), np.array(both[1])


def summary(config: Config, rounds: Rounds, judged, temperatures, num_fitted: int):
    """A row a position."""
    mine = rounds.of(judged)
    labels = calibration.survived(mine.accepted, len(temperatures))
    p = calibration.prefixes(mine.logits)
    scaled = calibration.prefixes(mine.logits, temperatures)
    before, after = errors(mine, temperatures)
    rng, resampled = np.random.default_rng(config.seed), []
    for _ in range(config.resamples):
        some = rounds.of(rng.choice(judged, len(judged)))
        if len(some.accepted):
            resampled.append(errors(some, temperatures))
    drawn = np.array(resampled)  # [resamples 2 G]
    ends = lambda x: np.percentile(x, [2.5, 97.5], axis=0)
    low, high = ends(drawn[:, 0] - drawn[:, 1])
    rows = []
    for k in range(len(temperatures)):
        bins = calibration.reliability(p[:, k], labels[:, k])
        bins_scaled = calibration.reliability(scaled[:, k], labels[:, k])
        rows.append(
            {
                "k": k + 1,
                "rounds": len(mine.accepted),
                "T_k": temperatures[k],
                "ece": float(before[k]),
                "ece_scaled": float(after[k]),
                "gain_low": float(low[k]),
                "gain_high": float(high[k]),
                "auc": calibration.auc(p[:, k], labels[:, k]),
                "brier": calibration.brier(p[:, k], labels[:, k]),
                "brier_scaled": calibration.brier(scaled[:, k], labels[:, k]),
                "said": float(p[:, k].mean()),
                "said_scaled": float(scaled[:, k].mean()),
                "was": float(labels[:, k].mean()),
                "fitted_on": num_fitted,
                "bins": [x.tolist() for x in bins],
                "bins_scaled": [x.tolist() for x in bins_scaled],
            }
        )
    return rows


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """Reliability of some positions: before on top, after below."""
    plt = figures.pyplot()
    at = np.linspace(0, len(rows) - 1, min(SHOWN, len(rows))).round().astype(int)
    fig, axes = plt.subplots(
        2,
        len(at),
        figsize=(0.6 + 2.4 * len(at), 5),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for column, i in enumerate(at):
        for axis, key, colour in zip(
            axes[:, column], ("", "_scaled"), figures.COLOURS, strict=False
        ):
            row = rows[i]
            count, said, was = (np.array(x, float) for x in row["bins" + key])
            size = 4 + 160 * count / max(np.nansum(count), 1)
            axis.plot([0, 1], [0, 1], color="black", lw=0.7)
            axis.scatter(said, was, size, color=colour, alpha=0.7)
            axis.set_title(f"k = {row['k']}, ECE {row['ece' + key]:.3f}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("said: first k accepted")
    axes[0, 0].set_ylabel("share that was\n(as trained)")
    axes[1, 0].set_ylabel("share that was\n(temperatures)")
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
