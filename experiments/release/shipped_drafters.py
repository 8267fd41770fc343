"""Trains the drafters that come with the package and puts them in its data folder.

    python experiments/release/shipped_drafters.py                 # tiny: all of them
    python experiments/release/shipped_drafters.py --names medusa

Each is `specjax train` with its default settings but those below, the target writing
its own data; the seconds are kept in the drafter's `about`. Run time: two to ten
minutes a drafter.
"""

import dataclasses
import json
import pathlib
import shutil
import time

import tyro

from specjax import checkpoints, drafters
from specjax.commands.train import Train

DATA = pathlib.Path(checkpoints.__file__).parent / "data" / "drafters"

STEPS = {  # these learn slower than plain heads do
    "blockwise": 1000,
    "dflash": 1000,
    "dflash2": 400,
    "dspark": 800,
    "draft_model": 600,
    "eagle": 800,
    "eagle3": 600,
    "gemma4_mtp": 600,
    "hydra_plus": 600,
    "medusa2": 400,
    "mtp": 600,
    "p_eagle": 400,
    "pard": 300,
    "pard2": 300,
}
FIELDS = {
    "blockwise": ("hidden_width=160",),
    "medusa2": ("rank=16",),
    "dflash2": ("mlp_width=176", "rank=16"),  # a megabyte
    # As many steps as it drafts, as the paper says; the norms of EAGLE-3.1 and a later
    # state, without which it is behind EAGLE-1 here (LOG).
    "eagle3": (
        "ttt_steps=5",
        "fc_norm=true",
        "norm_before_residual=true",
        "norm_output=true",
        "target_states=[2,4,7]",
    ),
    "p_eagle": ("gamma=4", "blocks=5"),
    "pard": ("gamma=4",),
    "pard2": ("gamma=4", "blocks=5"),
}
ADAPTED = {
    "medusa2": "medusa",
    "pard": "draft_model",
    "pard2": "pard",
}  # what a training starts from

RATES = {
    "medusa2": 2e-3,
    "pard": 2e-3,
    "pard2": 2e-3,
}  # of weights that are trained already


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    names: tuple[str, ...] = tuple(drafters.REGISTRY)
    runs: pathlib.Path = pathlib.Path("runs") / "shipped"


def main(config: Config) -> list[dict]:
    """Returns one row a drafter: name, seconds, expected tau, bytes."""
    rows = []
    for name in config.names:
        out = config.runs / f"{config.target}-{name}"
        began = time.perf_counter()
        metrics = config.runs / f"{config.target}-{name}.json"
        metrics.parent.mkdir(parents=True, exist_ok=True)
        Train(
            drafter=name,
            target=config.target,
            steps=STEPS.get(name),
            learning_rate=RATES.get(name),
            field=FIELDS.get(name, ()),
            init=pathlib.Path(ADAPTED[name]) if name in ADAPTED else None,
            out=out,
            json=metrics,
        ).run()
        seconds = time.perf_counter() - began
        folder = DATA / config.target / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(out / "drafter", folder)
        stored = json.loads((folder / "drafter.json").read_text())
        stored["about"]["seconds"] = round(seconds, 1)
        (folder / "drafter.json").write_text(json.dumps(stored, indent=2) + "\n")
        size = (folder / "drafter.safetensors").stat().st_size
        tau = json.loads(metrics.read_text())["tau"]
        rows.append({"name": name, "seconds": seconds, "tau": tau, "bytes": size})
    return rows


if __name__ == "__main__":
    for row in main(tyro.cli(Config)):
        print(row)
