"""What a traced program multiplies, counted from its shapes alone.

A program is traced with shapes in place of arrays, so that nothing is allocated, and
its matrix products are added up, but those that no result needs: a scan as often as it
runs, what a gradient computes again once more, of a branch by platform the one that is
no CPU's. What is read of a weight or a cache is known from where an
operand comes from: it stays the same numbers through reshapes, casts, slices and
gathers, and is read once however widely it is broadcast. Element-wise work and look-ups
of rows are not counted.
"""

import dataclasses
import math
from collections.abc import Set
from typing import Any, NamedTuple

import jax
from jax.interpreters.partial_eval import dce_jaxpr


@dataclasses.dataclass
class Work:
    """What a program multiplies: numbers are counted, not bytes."""

    weights: float = 0.0  # numbers of dense matrices read
    flops: float = 0.0  # with weights, experts included
    # Of each product with experts: rows routed, experts X, numbers of one expert.
    experts: list[tuple[float, int, float]] = dataclasses.field(default_factory=list)
    cache: float = 0.0  # numbers read of caches
    cache_flops: float = 0.0  # of products without weights
    reductions: float = 0.0  # products that end in an all-reduce

    def touched(self, per_token: int) -> float:
        """Numbers of experts read if each of X is as likely; `per_token` is k.

        X (1 - (1 - k/X)^n) of them for n tokens.
        """
        return float(
            sum(
                X * (1 - (1 - per_token / X) ** (rows / per_token)) * each
                for rows, X, each in self.experts
            )
        )

    def times(self, n: int) -> "Work":
        """The same pass over n times as many tokens; its caches are read once."""
        experts = [(rows * n, X, each) for rows, X, each in self.experts]
        flops, cache_flops = self.flops * n, self.cache_flops * n
        return dataclasses.replace(
            self, flops=flops, experts=experts, cache_flops=cache_flops
        )

    def __add__(self, other: "Work") -> "Work":
        names = (f.name for f in dataclasses.fields(self))
        return Work(*(getattr(self, n) + getattr(other, n) for n in names))


# Results of these are the same stored numbers as their first marked argument, or fewer.
SAME = (
    *("reshape", "convert_element_type", "broadcast_in_dim", "transpose", "squeeze"),
    *("slice", "pad", "select_n", "dynamic_update_slice", "dynamic_slice", "gather"),
    *("scatter", "stop_gradient", "copy", "split", "rev", "tile"),
)
JOINED = ("concatenate", "stack")
WEIGHT, CACHE = "weight", "cache"


class Mark(NamedTuple):
    """Whose numbers an array holds."""

    kind: str
    size: int  # numbers stored
    shape: tuple[int, ...] = ()  # as stored, if that was one array


class Ends(NamedTuple):
    """Numbers of outputs of products that are reduced over the chips."""

    dense: Set[int]
    experts: Set[int] = frozenset()  # none: they are added to a dense product first


def count(function, ends: Ends, weights: Any, cache: Any, *args: Any) -> Work:
    """The work of function(weights, cache, *args), all given as shapes."""
    traced = jax.make_jaxpr(function)(weights, cache, *args).jaxpr
    jaxpr, _ = dce_jaxpr(traced, [True] * len(traced.outvars), instantiate=True)
    kinds = [WEIGHT] * len(jax.tree.leaves(weights))
    kinds += [CACHE] * len(jax.tree.leaves(cache))
    invars = jaxpr.invars
    kinds += [None] * (len(invars) - len(kinds))
    marks = [
        k and Mark(k, _size(v), v.aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
        for k, v in zip(kinds, invars, strict=True)
    ]
    work = Work()
    _walk(jaxpr, marks, 1.0, work, ends)
    return work


def _size(var) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _walk(jaxpr, marks: list, times: float, work: Work, ends: Ends) -> list:
    """Adds the work of a traced program; a mark says whose numbers an array holds."""
    known: dict[Any, Any] = dict(zip(jaxpr.invars, marks, strict=True))
    read = lambda v: None if hasattr(v, "val") else known.get(v)
    for eqn in jaxpr.eqns:
        name, of = eqn.primitive.name, [read(v) for v in eqn.invars]
        out: list = [None] * len(eqn.outvars)
        if name in ("dot_general", "ragged_dot_general", "ragged_dot"):
            _product(eqn, of, times, work, ends)
        elif name == "scan":
            inner = eqn.params["jaxpr"].jaxpr
            out = _walk(inner, of, times * eqn.params["length"], work, ends)
        elif name == "cond":  # of `platform_dependent` the last branch is the default
            inner = eqn.params["branches"][-1].jaxpr
            out = _walk(inner, of[1:], times, work, ends)
        elif name == "while":  # how often it turns is not known: once
            inner, first = eqn.params["body_jaxpr"].jaxpr, eqn.params["cond_nconsts"]
            out = _walk(inner, of[first:], times, work, ends)
        elif (inner := _inside(eqn)) is not None:
            out = _walk(inner, of, times, work, ends)
        elif name in SAME:
            out = [next((m for m in of if m), None)] * len(out)
        elif name in JOINED and any(of):
            kind = next(m for m in of if m).kind
            sizes = [
                m.size if m else _size(v) for m, v in zip(of, eqn.invars, strict=True)
            ]
            out = [Mark(kind, sum(sizes))]
        known |= {v: m for v, m in zip(eqn.outvars, out, strict=True) if m}
    return [read(v) for v in jaxpr.outvars]


def _inside(eqn):
    """The program that a call such as jit or custom_jvp calls."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return getattr(eqn.params[name], "jaxpr", eqn.params[name])
    return None


def _product(eqn, of: list, times: float, work: Work, ends: Ends) -> None:
    """One matrix product. What is broadcast was read once, however often it is used."""
    a, b = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name.startswith("ragged"):
        if len(b) == 2:  # the gradient of experts: rows [R D] and [R F] to [X D F]
            work.flops += times * 2 * a[0] * a[1] * b[1]
            return
        work.experts.append((times * a[0], b[0], float(math.prod(b[1:]))))
        work.flops += times * 2 * a[0] * math.prod(b[1:])
        work.reductions += times * (b[2] in ends.experts)
        return
    over, batch = eqn.params["dimension_numbers"]
    inside = math.prod(a[i] for i in over[0])
    flops = times * 2 * _size(eqn.outvars[0]) * inside
    sides = zip(of, eqn.invars, (a, b), over, batch, strict=True)
    for mark, var, shape, summed, many in sides:
        if mark is None:
            continue
        numbers = times * min(mark.size, _size(var))
        if mark.kind == CACHE:
            work.cache += numbers
            continue
        work.weights += numbers
        free = [n for i, n in enumerate(shape) if i not in (*summed, *many)]
        outputs = math.prod(free)
        # Of [H E D] E: heads are split over the chips, be they as wide as the stream.
        each = mark.shape[-2] if len(mark.shape) > 2 else outputs
        work.reductions += times * (each in ends.dense and outputs % each == 0)
    if any(mark and mark.kind == WEIGHT for mark in of):
        work.flops += flops
    else:
        work.cache_flops += flops
