"""`specjax certify`: is it lossless, for every drafter, rule and sampling setting."""

import dataclasses
import pathlib
import sys

from specjax.commands import common


@dataclasses.dataclass(frozen=True)
class Certify:
    """Check that the output law is the target's, and that wrong rules are caught."""

    drafters: str = ""  # registry names, comma-separated; all of them if empty
    quick: bool = False  # sums the laws, leaves out the engine's runs
    json: pathlib.Path | None = None

    def run(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from specjax import certify, console, drafters

        common.check_writable(self.json)
        names = list(drafters.REGISTRY)
        if self.drafters:
            names = common.names_in("--drafters", self.drafters)
        for name in names:
            drafters.get(name)  # an unknown name says which are known
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<60}"),
            TimeElapsedColumn(),
            console=common.terminal(stderr=True),
            disable=not sys.stderr.isatty(),
        ) as progress:
            bar = progress.add_task("")
            tick = lambda what: progress.update(bar, description=what)
            report = certify.certify(names, quick=self.quick, tick=tick)
        out = common.terminal()
        out.print(console.certificate_table(report["rows"]))
        out.print(console.bugs_table(report["planted_bugs"]))
        checks = sum("p_value" in r for r in report["rows"])
        out.print(
            f"{checks} p-values, each below {certify.FALSE_ALARM:g} by chance that "
            "often: a right program fails once in "
            f"{1 / max(checks, 1) / certify.FALSE_ALARM:,.0f} runs."
        )
        if self.json is not None:
            console.write_json(self.json, report)
            out.print(f"wrote {self.json}")
        failed = [r for r in report["rows"] if not r["passed"]]
        missed = [b["name"] for b in report["planted_bugs"] if not b["caught"]]
        if failed or missed:
            raise ValueError(
                f"{len(failed)} of {len(report['rows'])} rows failed and "
                f"{len(missed)} planted bugs were missed; see the tables."
            )
