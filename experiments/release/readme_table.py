"""Writes a result of `specjax bench` into the table at the top of the README.

    specjax bench --drafters all --out runs/readme
    python experiments/release/readme_table.py --result runs/readme/bench.json

Run time: a second, after the five minutes of the bench.
"""

import dataclasses
import json
import pathlib

import tyro

from specjax import console

BEGIN = "<!-- bench table: written by `python experiments/release/readme_table.py` -->"
END = "<!-- end of bench table -->"


@dataclasses.dataclass(frozen=True)
class Config:
    result: pathlib.Path  # bench.json
    readme: pathlib.Path = pathlib.Path(__file__).parents[2] / "README.md"


def main(config: Config) -> str:
    """Returns the table that now stands in the README."""
    result = json.loads(config.result.read_text())
    versions = result["versions"]
    table = (
        f"{console.markdown(result['rows'])}\n\nTarget `{result['target']}` on "
        f"{result['device']}, jax {versions['jax']}, specjax {versions['specjax']}; "
        f"{result['settings']['num_prompts']} held-out prompts a task, batch 1."
    )
    text = config.readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{config.readme} lacks the lines {BEGIN!r} and {END!r}.")
    config.readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return table


if __name__ == "__main__":
    print(main(tyro.cli(Config)))
