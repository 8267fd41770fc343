"""`specjax drafters` and `specjax info`: what there is."""

import dataclasses
import pathlib

from specjax.commands import common


@dataclasses.dataclass(frozen=True)
class Drafters:
    """List the registered drafters: what each reads, its passes, what is trained."""

    json: pathlib.Path | None = None

    def run(self) -> None:
        from rich.table import Table

        from specjax import console, drafters

        cards = [
            {"name": name} | dataclasses.asdict(cls.card)
            for name, cls in drafters.REGISTRY.items()
        ]
        table = Table(header_style="bold")
        for column in cards[0]:
            table.add_column(column)
        for card in cards:
            table.add_row(*(str(value) for value in card.values()))
        common.terminal().print(table)
        if self.json:
            console.write_json(self.json, {"drafters": cards})


@dataclasses.dataclass(frozen=True)
class Info:
    """Print devices, versions, targets and shipped drafters."""

    json: pathlib.Path | None = None

    def run(self) -> None:
        from specjax import checkpoints, console, targets

        facts = {
            "device": common.device(),
            "versions": common.versions(),
            "targets": list(targets.NAMES),
            "shipped": {t: list(checkpoints.shipped(t)) for t in targets.NAMES},
        }
        for name, version in facts["versions"].items():
            print(f"{name:<18}{version}")
        print(f"{'device':<18}{facts['device']}")
        for target, names in facts["shipped"].items():
            print(f"{'target ' + target:<22}drafters: {', '.join(names) or 'none'}")
        if self.json:
            console.write_json(self.json, facts)
