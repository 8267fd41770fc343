"""`specjax cost`: what drafters are worth here, or on chips that are not here."""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from specjax.commands import common

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)  # that speedups are shown for
TREES = (8, 16, 32)  # nodes of the trees that are looked for
MAX_GAMMA = 256  # drafts are traced whole
MEASURED = ("gammas", "target", "temperature", "tasks", "num_prompts")
MEASURED += ("max_new_tokens", "repeats", "seed")
PLANNED = ("chips", "model", "context", "max_gamma", "draft_vocab", "weight_bytes")
PLANNED += ("cache_bytes", "bandwidth_share", "compute_share")
PLANNED += ("collective_us", "pass_us")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Say what drafters are worth: c, v, best gamma, break-even; here, or on --chip."""

    # Names, comma-separated; all if empty. A plan also takes draft_model:MODEL.
    drafters: str = ""
    # Acceptance by position, the last going on; measured if none is given.
    alpha: tuple[float, ...] = ()
    batch: tuple[int, ...] = (1,)  # rows in a pass; several are measured one by one
    # Where c is measured; 1, 3, 7, .. and the drafter's own if none is given.
    gammas: tuple[int, ...] = ()
    json: pathlib.Path | None = None  # all numbers, and passes a second by tokens

    target: str = "tiny"  # to measure on this machine: a name, a hub id or a folder
    temperature: float = 0.0  # of the texts that acceptance is measured on
    tasks: str = "code,math,chat"  # of the shipped prompts
    num_prompts: int = 4  # a task
    max_new_tokens: int = 96  # a prompt
    repeats: int = 7  # of the timing
    seed: int = 0  # of the texts

    # To plan from shapes: a100, h100, h200, b200, l40s, mi300x, v5e, v5p, v6e, v7x.
    chip: str | None = None
    chips: int = 1  # tensor parallel
    # A known shape such as llama-3.1-70b, a folder with config.json, a hub id; the
    # smallest Llama 3.1 if none is given.
    model: str | None = None
    context: int = 2048  # tokens of a row in the cache
    max_gamma: int = 16  # longest draft that is planned
    draft_vocab: int | None = None  # ids of drafters that score fewer, such as eagle3's
    weight_bytes: float = 2.0  # a number of the weights
    cache_bytes: float = 2.0  # a number of the cache
    bandwidth_share: float = 0.7  # achieved of the chip's bandwidth
    compute_share: float = 0.5  # achieved of its dense bf16 peak
    collective_us: float = 25.0  # of an all-reduce before its bytes
    pass_us: float = 20.0  # of a pass beside its products

    def run(self) -> None:
        common.check_writable(self.json)
        common.check_seed(self.seed)
        for flag, values in (("--batch", self.batch), ("--gammas", self.gammas)):
            for value in values:
                common.check_range(flag, value, 1)
        if not self.batch:
            raise ValueError("--batch needs at least one number, such as 1.")
        if bad := [a for a in self.alpha if not 0 <= a <= 1]:
            raise ValueError(f"--alpha {bad[0]} is no acceptance rate; give 0 to 1.")
        self._check_kind()
        result = self._measure() if self.chip is None else self._plan()
        if self.json:
            from specjax import console

            console.write_json(self.json, result | {"versions": common.versions()})
            print(f"wrote {self.json}")

    def _check_kind(self) -> None:
        """Refuses flags of a plan in a measurement, and the other way round."""
        default = {f.name: f.default for f in dataclasses.fields(self)}
        given = [n for n in MEASURED + PLANNED if getattr(self, n) != default[n]]
        for name in given:
            flag = f"--{name.replace('_', '-')} {getattr(self, name)}"
            if self.chip is None and name in PLANNED:
                raise ValueError(f"{flag} is of a plan; name its --chip, such as h100.")
            if self.chip is not None and name == "gammas":
                raise ValueError(
                    "a plan has every gamma up to --max-gamma; not --gammas."
                )
            if self.chip is not None and name in MEASURED:
                raise ValueError(f"{flag} is of a measurement here; leave out --chip.")

    # ---- measured

    def _measure(self) -> dict[str, Any]:
        from specjax import cost, targets

        common.check_range("--num-prompts", self.num_prompts, 1)
        common.check_range("--max-new-tokens", self.max_new_tokens, 8)
        common.check_range("--repeats", self.repeats, 1)
        common.names_in("--tasks", self.tasks)
        pretrained = targets.load(self.target)
        loaded = self._load(pretrained)
        out = common.terminal()
        where = f"{pretrained.name} on {common.device()}"
        curves, rows = [], []
        for batch in self.batch:
            runner = self._runner(pretrained, batch)
            say = lambda what: print(f"timing {what:<60}", end="\r", file=sys.stderr)
            times = cost.measure(
                runner,
                loaded if batch == self.batch[0] else {},
                self.temperature,
                gammas=self.gammas or None,
                tick=say if sys.stderr.isatty() else lambda what: None,
            )
            curves.append(_curve_json(times.curve, 32 * batch))
            out.print(_curve_table(times.curve, f"{where}, {_rows(batch)}"))
            if batch == self.batch[0]:
                rows = [
                    self._judge(runner, times, name, pair[0], pair[1])
                    for name, pair in loaded.items()
                ]
        out.print(*_measured_tables(rows, self._how(), out))
        out.print(MEASURED_NOTE, style="dim")
        return {
            "target": pretrained.name,
            "device": common.device(),
            "temperature": self.temperature,
            "curves": curves,
            "drafters": rows,
        }

    def _how(self) -> str:
        if self.alpha:
            return f"acceptance given: {' '.join(f'{a:g}' for a in self.alpha)}"
        return (
            f"acceptance measured at T = {self.temperature:g}, {_rows(self.batch[0])}"
        )

    def _load(self, pretrained) -> dict[str, tuple[Any, Any]]:
        from specjax import checkpoints

        specs = list(checkpoints.shipped(self.target))
        if self.drafters:
            specs = common.names_in("--drafters", self.drafters)
        if not specs:
            raise FileNotFoundError(
                f"no drafter is shipped for target {self.target!r}; train one with "
                f"`specjax train NAME --target {self.target}`, give --drafters FOLDER."
            )
        loaded = {}
        for spec in specs:
            name, drafter, params = common.load_drafter(spec, self.target, pretrained)
            loaded[spec if name in loaded else name] = (drafter, params)
        return loaded

    def _runner(self, pretrained, batch: int):
        from specjax import bench, corpus

        tasks = corpus.shipped_prompts(self.tasks)
        prompts = [
            p for t in tasks.values() for p in corpus.spread(t, self.num_prompts)
        ]
        settings = bench.Settings(
            temperatures=(self.temperature,),
            max_new_tokens=self.max_new_tokens,
            batch_size=batch,
            seed=self.seed,
            timing_repeats=self.repeats,
        )
        return bench.Bench(pretrained, {"all": prompts}, settings)

    def _judge(self, runner, times, name: str, drafter: Any, params: Any):
        """One drafter: eq. 1 to 3 of `cost` and, where it was decoded, the truth."""
        runner = runner.on_target_of(drafter, params)
        from specjax import cost, metrics

        G, run = drafter.gamma, None
        if self.alpha:
            survived = cost.survival(self.alpha, G)
        else:
            run, plain = self._decode(runner, drafter, params)
            survived = metrics.survival_by_position(run.trace)
        gammas = range(1, G + 1)
        v = times.curve.ratio([g + 1 for g in gammas])
        c = times.draft_cost(name, gammas)
        speeds = cost.speedups(survived, v, c)
        best, speed = cost.best_gamma(speeds)
        row: dict[str, Any] = {
            "drafter": name,
            "passes": drafter.card.passes,
            "gammas": list(gammas),
            "survival": list(survived),
            "tau": cost.taus(survived).tolist(),
            "v": v.tolist(),
            "c": c.tolist(),
            "speedup": speeds.tolist(),
            "best_gamma": best,
            "best_speedup": speed,
            "break_even": cost.break_even(v, c),
            "measured": [],
        }
        if run is None:
            return row
        row["measured"].append(_beside(G, run, plain, speeds))
        if best != G:
            shorter = common.with_gamma(drafter, best)
            run, plain = self._decode(runner, shorter, params)
            row["measured"].append(_beside(best, run, plain, speeds))
        row["trees"] = self._trees(runner, times, drafter, params, float(c[-1]))
        return row

    def _decode(self, runner, drafter, params):
        from specjax.generate import Weights

        weights = Weights(runner.pretrained.params, params)
        return runner.paired(runner.model(drafter, self.temperature), weights, "all")

    def _trees(self, runner, times, drafter, params, c: float) -> list[dict[str, Any]]:
        """Trees of observed ranks, greedy, searched on other prompts than judged."""
        from specjax import corpus, search, tree

        fields = {f.name for f in dataclasses.fields(drafter)}
        if drafter.card.passes != "1" or "topology" not in fields or self.temperature:
            return []  # its laws depend on what it drafted: it chooses trees itself
        chat = runner.pretrained.tokenizer.chat
        others = [
            chat([{"role": "user", "content": p}])
            for task in corpus.shipped_prompts(self.tasks).values()
            for p in corpus.spread(
                [q for q in task if q not in corpus.spread(task, self.num_prompts)],
                self.num_prompts,
            )
        ]
        held = runner.tasks["all"]
        if not others:
            return []
        seen, judged = (
            search.measure_ranks(
                runner.pretrained,
                drafter,
                params,
                prompts,
                max_new_tokens=self.max_new_tokens,
            )
            for prompts in (others, held)
        )
        if not len(seen) or not len(judged):
            return []
        found = []
        for nodes in TREES:
            shape = tree.best_observed_tree(seen, nodes, 10)
            tau = tree.expected_tau(shape, judged)
            speed = tau / (float(times.curve.ratio(nodes)) + c)
            found.append(
                {"nodes": nodes, "tau": tau, "speedup": speed, "parents": shape.parents}
            )
        return found

    # ---- planned

    def _plan(self) -> dict[str, Any]:
        from specjax import roofline

        assert self.chip is not None
        if self.chip not in roofline.CHIPS:
            raise ValueError(
                f"unknown chip {self.chip!r}; known: {', '.join(roofline.CHIPS)}."
            )
        common.check_range("--max-gamma", self.max_gamma, 1, MAX_GAMMA)
        if len(self.batch) != 1:
            raise ValueError("a plan is for one --batch; call it once for each.")
        setup = roofline.Setup(
            roofline.CHIPS[self.chip],
            chips=self.chips,
            context=self.context,
            batch=self.batch[0],
            weight_bytes=self.weight_bytes,
            cache_bytes=self.cache_bytes,
            bandwidth_share=self.bandwidth_share,
            compute_share=self.compute_share,
            collective=self.collective_us * 1e-6,
            overhead=self.pass_us * 1e-6,
        )
        name = self.model or "llama-3.1-8b"
        plan = roofline.Plan(roofline.model(name), setup)
        plan.check_memory()
        V = plan.config.vocab_size
        common.check_range("--draft-vocab", self.draft_vocab, 1, V)
        alphas: tuple[float, ...] = self.alpha or (0.8,)
        rows = []
        for spec in self._planned():
            row = roofline.judge(
                plan, spec, alphas, self.max_gamma, self.draft_vocab, ALPHAS
            )
            rows.append(row)
        curve = plan.curve(max(32, self.max_gamma + 1))
        out = common.terminal()
        out.print(_plan_head(f"{name} on {self.chips} x {self.chip}", plan))
        out.print(_curve_table(curve, f"target pass, {_rows(setup.batch)}", plan))
        out.print(*_plan_tables(rows, alphas, out))
        out.print(PLAN_NOTE, style="dim")
        return {
            "model": name,
            "chip": self.chip,
            "setup": dataclasses.asdict(setup),
            "params": plan.num_params,
            "curves": [_curve_json(curve, setup.batch * (self.max_gamma + 1))],
            "alphas": alphas,
            "drafters": rows,
        }

    def _planned(self) -> list[str]:
        """Drafters to plan; of none named, all that this model can have."""
        from specjax import drafters

        if self.drafters:
            return common.names_in("--drafters", self.drafters)
        return list(drafters.REGISTRY)


MEASURED_NOTE = """\
c, v: a draft and a verify pass in plain passes. S: tau / (v + c). Break-even:
the least constant acceptance that gains at the best gamma. Trees: greedy, of
ranks seen on other prompts, at the cost of the whole chain's draft."""
PLAN_NOTE = """\
S: tau / (v + c). c: a draft and its commit in plain passes, of the drafter's
own traced program. Even: the least constant acceptance that gains. A constant
one flatters long drafts; --alpha takes one a position. specjax/roofline.py
says what is assumed."""


def _rows(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch} rows"


def _curve_json(curve, up_to: int) -> dict[str, Any]:
    return {
        "rows": curve.rows,
        "tokens": curve.tokens,
        "seconds": curve.seconds,
        "passes": curve.passes(up_to),
    }


def _beside(gamma: int, run, plain, speeds) -> dict[str, Any]:
    """Measured speedup of a whole run beside what eq. 3 says."""
    from specjax import metrics

    measured = run.tokens_per_second / plain.tokens_per_second
    predicted = float(speeds[gamma - 1])
    return {
        "gamma": gamma,
        "tau": metrics.tau(run.trace),
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
    }


def _table(title: str, columns: Sequence[str], rows: Sequence[dict[str, str]]):
    """Named cells; the first column is text."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title or None,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        collapse_padding=True,
    )
    for i, column in enumerate(columns):
        column_width = None if i else 16  # a longer name goes on in the next line
        side = "right" if i else "left"
        table.add_column(column, justify=side, max_width=column_width, overflow="fold")
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _tables(keys: list[str], parts: dict[str, list[str]], rows, out) -> list[Any]:
    """One table, or one for each titled part where the screen is too narrow."""
    from specjax import console

    title = "; right: ".join(filter(None, parts))
    whole = _table(title, keys + [c for part in parts.values() for c in part], rows)
    if console.fits(whole, out):
        return [whole]
    return [_table(title, keys + part, rows) for title, part in parts.items()]


def _curve_table(curve, title: str, plan=None):
    rows = []
    for tokens, seconds in zip(curve.tokens, curve.seconds, strict=True):
        row = {
            "nodes a row": str(tokens // curve.rows),
            "tokens": str(tokens),
            "ms": f"{seconds * 1e3:.2f}",
            "v": f"{seconds / curve.seconds[0]:.2f}",
            "passes/s": f"{1 / seconds:.1f}",
        }
        if plan is not None:
            row["bound by"] = plan.target_pass(tokens).bound
        rows.append(row)
    return _table(title, list(rows[0]), rows)


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _measured_tables(rows: list[dict[str, Any]], how: str, out) -> list[Any]:
    cells = []
    for row in rows:
        told = {m["gamma"]: m for m in row["measured"]}
        G, best = row["gammas"][-1], row["best_gamma"]
        tree = max(row.get("trees", []), key=lambda t: t["speedup"], default=None)
        for gamma in dict.fromkeys((G, best)):
            at, m = gamma - 1, told.get(gamma)
            last = gamma == best
            cells.append(
                {
                    "drafter": row["drafter"] if gamma == G else "",
                    "gamma": f"{gamma}{'*' if last else ' '}",
                    "tau": f"{row['tau'][at]:.2f}",
                    "c": f"{row['c'][at]:.2f}",
                    "v": f"{row['v'][at]:.2f}",
                    "S": f"{row['speedup'][at]:.2f}x",
                    "measured": f"{m['measured']:.2f}x" if m else "",
                    "error": f"{m['error']:+.0%}" if m else "",
                    "break-even": _share(row["break_even"]) if last else "",
                    "best tree": f"{tree['nodes']}: {tree['speedup']:.2f}x"
                    if tree and last
                    else "",
                }
            )
    parts = {
        f"{how}; * best gamma": ["tau", "c", "v", "S"],
        "": ["measured", "error", "break-even", "best tree"],
    }
    return _tables(["drafter", "gamma"], parts, cells, out)


def _plan_head(what: str, plan) -> str:
    s, part = plan.setup, plan.target_pass(plan.setup.batch)
    weights = plan.num_params * s.weight_bytes / 1e9
    cache = plan.stored_per_row * s.batch * s.cache_bytes / 1e9
    ms = {f: getattr(part, f) * 1e3 for f in ("weights", "cache", "collectives")}
    return (
        f"{what}, context {s.context}, {_rows(s.batch)}\n"
        f"{weights:.0f} GB of weights, {cache:.2g} GB of cache; "
        f"{s.collective * 1e6:g} us an all-reduce, {s.overhead * 1e6:g} us a pass\n"
        f"achieved: {s.bandwidth_share:.0%} of {s.chip.bandwidth / 1e12:g} TB/s, "
        f"{s.compute_share:.0%} of {s.chip.flops / 1e12:g} TFLOP/s; "
        f"{1 / part.seconds:.0f} tokens/s a row\n"
        f"plain round {part.seconds * 1e3:.2f} ms: weights {ms['weights']:.2f}, cache "
        f"{ms['cache']:.2f}, all-reduces {ms['collectives']:.2f}"
    )


def _plan_tables(rows: list[dict[str, Any]], alphas, out) -> list[Any]:
    given = " ".join(f"{a:g}" for a in alphas)
    cells = []
    for row in rows:
        at = row["best_gamma"] - 1
        own = {
            "params": f"{row['params'] / 1e9:.2f}B",
            "c(1)": f"{row['c'][0]:.3f}",
            "gamma": str(row["best_gamma"]),
            "c": f"{row['c'][at]:.2f}",
            "v": f"{row['v'][at]:.2f}",
            "tau": f"{row['tau'][at]:.2f}",
            "S": f"{row['best_speedup']:.2f}x",
            "even": _share(row["break_even"]),
        }
        others = {
            f"{a:g}".removeprefix("0"): f"{x['speedup']:.2f}"
            for a, x in zip(ALPHAS, row["by_alpha"], strict=True)
        }
        cells.append({"drafter": row["drafter"]} | own | others)
    parts = {
        f"acceptance {given}, at the best gamma": list(own),
        "S at the best gamma of others": list(others),
    }
    return _tables(["drafter"], parts, cells, out)
