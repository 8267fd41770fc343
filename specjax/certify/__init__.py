"""Is it lossless? The answer for every drafter, rule and sampling setting, as a table.

    exact     law of the first tokens summed over all random draws: max_tv
    drafts    drafted tokens are drawn from the laws they carry: p_value
    sampled   the engine, a chi-square of the first four tokens: p_value
    rows      neighbouring rows are independent: p_value
    moved     share of texts that depend on place, neighbours or padding: max_tv
    greedy    share of texts that differ from the target's own: max_tv

A p-value below `FALSE_ALARM` fails; a right program fails a whole certificate of n such
rows with probability n * 1e-6. The other rows have no false alarms. `planted` runs the
bank of wrong rules through the same checks, `broken` an engine with a line replaced.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specjax import verify
from specjax.certify import broken, engine, planted
from specjax.certify.engine import RULES_OF
from specjax.certify.exact import TOLERANCE
from specjax.drafters import REGISTRY
from specjax.sampling import Sampling
from specjax.testing import FALSE_ALARM

SETTINGS = {
    "T=1": Sampling(),
    "T=0.7 top-k 3 top-p 0.9 min-p 0.02": Sampling(0.7, 3, 0.9, 0.02),
}

Tick = Callable[[str], None]


def rows_of(
    name: str,
    settings: dict[str, Sampling] | None = None,
    *,
    quick: bool = False,
    tick: Tick = lambda what: None,
) -> list[dict[str, Any]]:
    """The rows of one drafter; `quick` leaves out the engine's, which compile long."""
    settings = SETTINGS if settings is None else settings
    found: list[dict[str, Any]] = []

    def add(rule, topology, sampling, method, value):
        is_p = method in ("drafts", "sampled", "rows")
        limit = TOLERANCE if method == "exact" else 0.0
        found.append(
            {
                "drafter": name,
                "rule": rule,
                "topology": topology,
                "sampling": sampling,
                "method": method,
                "p_value" if is_p else "max_tv": value,
                "passed": bool(value >= FALSE_ALARM if is_p else value <= limit),
            }
        )

    topologies = [t for t in RULES_OF if engine.has_topology(name, t)]
    label, sampling = list(settings.items())[-1]
    own = engine.drafting(name, "token", sampling)
    add("-", "own chain", label, "drafts", engine.own_drafts_p_value(name, own))
    for label, sampling in settings.items():
        for topology in topologies:
            tick(f"{name} {topology} {label}")
            judged = set()
            for rule in RULES_OF[topology]:
                drafting = engine.drafting(name, rule, sampling)
                if drafting not in judged and not drafting.greedy:
                    judged.add(drafting)
                    p = engine.drafts_p_value(name, topology, drafting)
                    add("-", topology, label, "drafts", p)
                at = (name, verify.get(rule), topology, drafting, sampling)
                distance, _ = engine.exact_law(*at)
                add(rule, topology, label, "exact", distance)
    label, sampling = next(iter(settings.items()))
    if engine.gives_confidence(name, engine.drafting(name, "token", sampling)):
        for rule in ("token", "block"):
            distance = engine.stopped_law(name, rule, sampling).distance
            add(rule, "chain, stopped", label, "exact", distance)
    for topology in [] if quick else topologies:
        tick(f"{name} {topology} engine")
        if topology != "tree":  # compiled anew for temperature 0
            share = engine.greedy_difference(name, topology)
            add("all", topology, "T=0", "greedy", share)
        if topology == "dynamic":  # the commit is that of a tree
            continue
        label, sampling = list(settings.items())[-1 if topology == "tree" else 0]
        k = engine.kit(name, topology)
        rule = RULES_OF[topology][0]
        if getattr(k.drafter, "propose", "sample") == "argmax":
            rule = "match"
        certificate = engine.sampled(name, sampling, rule=rule, topology=topology)
        add(rule, topology, label, "sampled", certificate.p_value)
        add(rule, topology, label, "rows", certificate.pair_p_value)
        share = engine.moved(
            name, sampling, certificate.texts, rule=rule, topology=topology
        )
        add(rule, topology, label, "moved", share)
    return found


def certify(
    names: Sequence[str] | None = None,
    *,
    quick: bool = False,
    tick: Tick = lambda what: None,
) -> dict[str, Any]:
    """The whole certificate: `rows` and `planted_bugs`."""
    # Compiling is most of the time and releases the interpreter: a thread a core.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_one = lambda name: rows_of(name, quick=quick, tick=tick)
        rows = [row for part in pool.map(of_one, names or REGISTRY) for row in part]
    # The bugs replace functions of modules, so nothing may run beside them.
    tick("planted bugs")
    bugs = planted.report()
    if not quick:
        bugs += broken.report()
    return {"rows": rows, "planted_bugs": bugs}
