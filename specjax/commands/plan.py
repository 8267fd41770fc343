"""`specjax plan`: what a training needs on devices that are not here."""

import contextlib
import dataclasses
import pathlib
import sys
from typing import Any

from specjax.commands import common


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan a training: bytes a device, flops, hours, where features come from."""

    drafter: str = "eagle3"  # registry name, of the paper's shape
    # A known shape such as qwen3-8b, a folder with config.json, a hub id
    target: str = "qwen3-8b"
    mesh: str = "fsdp=8"  # data=2,fsdp=4,tensor=4
    chip: str = "v5p"  # a100, h100, h200, b200, l40s, mi300x, v5e, v5p, v6e, v7x
    batch_size: int | None = None  # texts a step; None: as many as data x fsdp
    length: int = 2048  # tokens of a text
    tokens: float = 1e8  # of all texts
    epochs: int = 4
    remat: bool = False
    field: tuple[str, ...] = ()  # of the drafter as name=value, such as segments=16
    serve_batch: int = 8  # rows that are served together
    context: int = 4096  # tokens of a row in the cache
    disk: float = 2e9  # bytes a second that features are read with
    compute_share: float = 0.5  # achieved of the chip's dense bf16 peak
    bandwidth_share: float = 0.7  # achieved of its bandwidth
    serving: bool = True  # compile a round of generation too: the slowest part
    # Compile for these chips, such as v5p:4x4x2, instead of for faked CPU devices;
    # needs libtpu, no TPU
    topology: str | None = None

    json: pathlib.Path | None = None

    def run(self) -> None:
        import jax

        from specjax import drafters, roofline
        from specjax.sharding import MeshShape

        common.check_writable(self.json)
        fields = common.parse_fields(self.field)
        common.check_fields(self.drafter, drafters.get(self.drafter), fields)
        if self.chip not in roofline.CHIPS:
            raise ValueError(
                f"unknown chip {self.chip!r}; known: {', '.join(roofline.CHIPS)}."
            )
        shape = MeshShape.parse(self.mesh)
        # A device of the plan is a faked one of this CPU: asked for before JAX starts.
        jax.config.update("jax_platforms", "cpu")
        with contextlib.suppress(RuntimeError):  # it has started: with how many it has
            jax.config.update("jax_num_cpu_devices", shape.size)

        from specjax import plan

        rows = shape.data * shape.fsdp
        short = self.target.rpartition("/")[2].lower()  # of a hub id
        job = plan.Job(
            roofline.model(short if short in roofline.MODELS else self.target),
            self.drafter,
            shape,
            batch_size=rows if self.batch_size is None else self.batch_size,
            length=self.length,
            tokens=self.tokens,
            epochs=self.epochs,
            remat=self.remat,
            fields=tuple(fields.items()),
            serve_batch=self.serve_batch,
            context=self.context,
            chip=roofline.CHIPS[self.chip],
            compute_share=self.compute_share,
            bandwidth_share=self.bandwidth_share,
            disk=self.disk,
        )
        made = plan.Plan(job, self._devices())
        result = self._compile(made)
        out = common.terminal()
        head, bytes_, modes = _tables(self, made, result)
        out.print(head)
        out.print(bytes_)
        out.print(modes)
        out.print(NOTE if self.topology is None else NOTE_TPU, style="dim")
        print(_advice(result))
        if self.json:
            from specjax import console

            console.write_json(self.json, result | {"versions": common.versions()})
            print(f"wrote {self.json}")

    def _devices(self):
        """Chips of the topology, described by libtpu; None: this machine's own."""
        if self.topology is None:
            return None
        from jax.experimental import topologies

        try:
            described = topologies.get_topology_desc(
                topology_name=self.topology, platform="tpu"
            )
        except (RuntimeError, NotImplementedError, ValueError) as error:
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"--topology {self.topology} could not be described ({cause}); it "
                "needs the libtpu of this jax and a name such as v5p:4x4x2."
            ) from None
        return list(described.devices)

    def _compile(self, made) -> dict[str, Any]:
        def say(what: str) -> None:
            if sys.stderr.isatty():
                print(f"compiling {what:<40}", end="\r", file=sys.stderr)

        say("the target's pass")
        programs = {"features": dataclasses.asdict(made.features)}
        say("the drafter's step")
        programs["step"] = dataclasses.asdict(made.step)
        if self.serving:
            say("a round of generation")
            programs["round"] = dataclasses.asdict(made.round)
        say("")
        return {
            "target": self.target,
            "drafter": self.drafter,
            "mesh": dataclasses.asdict(made.job.mesh),
            "chip": self.chip,
            "batch_size": made.job.batch_size,
            "bytes": {
                "target": made.bytes(made.params),
                "drafter": made.bytes(made.draft_params),
                "optimiser": made.bytes(made.state),
                "kv_cache": made.cache_bytes,
            },
            "programs": programs,
            "flops_per_token": made.flops,
            "seconds_per_step": {x: made.seconds(x) for x in ("target", "drafter")},
            "feature_bytes_per_token": {
                x: made.stored(x) for x in ("bfloat16", "int8", "logits")
            },
            "modes": [dataclasses.asdict(m) for m in made.modes()],
        }


_TIME = (
    "Flops are with what a gradient computes again. Seconds: flops at the share of the "
    "peak that is given; what the devices send one another is not in them."
)
NOTE = (
    "Programs compiled by XLA for the CPU, from shapes: arguments are exact, what they "
    f"need besides is too high, of experts many times (--topology). {_TIME}"
)
NOTE_TPU = f"Programs compiled by XLA for TPU, from shapes. {_TIME}"


def _size(n: int | float) -> str:
    for unit, by in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if n >= by:
            return f"{n / by:.3g} {unit}"
    return f"{n / 1e3:.3g} kB"


def _tables(asked: Plan, made, result: dict[str, Any]):
    from rich.table import Table

    job, flops = made.job, result["flops_per_token"]
    m = job.mesh
    seconds = result["seconds_per_step"]
    head = (
        f"{asked.drafter} for {asked.target} on {m.size} x {asked.chip} (data "
        f"{m.data}, fsdp {m.fsdp}, tensor {m.tensor}): {job.batch_size} texts of "
        f"{job.length} tokens a step\n{flops['target'] / 1e9:.3g} GFLOP a token of the "
        f"target, {flops['drafter'] / 1e9:.3g} of the drafter's step; a step takes "
        f"{seconds['target'] * 1e3:.3g} + {seconds['drafter'] * 1e3:.3g} ms"
    )
    memory = Table(title="bytes on one device")
    for name in ("", "weights", "optimiser", "KV cache", "arguments", "besides", "sum"):
        memory.add_column(name, justify="left" if not name else "right")
    b = result["bytes"]
    labels = {
        "features": ("target over the texts", b["target"], 0, 0),
        "step": ("drafter's step", b["drafter"], b["optimiser"], 0),
        "round": (
            f"serving {job.serve_batch} rows of {job.context}",
            b["target"] + b["drafter"] // 2,
            0,
            b["kv_cache"],
        ),
    }
    for key, program in result["programs"].items():
        label, *parts = labels[key]
        besides = program["temporary"] + program["results"]
        sums = program["arguments"], besides, program["arguments"] + besides
        cells = [_size(x) if x else "" for x in (*parts, *sums)]
        memory.add_row(label, *cells)
    modes = Table(
        title=f"features of {job.tokens:.3g} tokens, {job.epochs} epochs, "
        f"on chips of {_size(job.chip.memory)}; the first is recommended"
    )
    for name in ("features", "on disk", "a device", "hours", "fits"):
        modes.add_column(name, justify="left" if name == "features" else "right")
    for mode in result["modes"]:
        fits = "yes" if mode["fits"] else "no"
        fits = fits if mode["offered"] else "not offered"
        modes.add_row(
            mode["name"],
            _size(mode["storage"]),
            _size(mode["memory"]),
            f"{mode['hours']:.3g}",
            fits,
        )
    return head, memory, modes


def _advice(result: dict[str, Any]) -> str:
    best = result["modes"][0]
    if not (best["fits"] and best["offered"]):
        return "nothing fits: give more devices, fewer texts a step, or --remat."
    how = "specjax train " + result["drafter"]
    sizes = ",".join(f"{k}={v}" for k, v in result["mesh"].items() if v > 1)
    how += f" --mesh {sizes}" if sizes else ""
    if best["name"].startswith("cached"):
        dtype = best["name"].rpartition(" ")[2]
        how += f" --feature-cache FOLDER --feature-dtype {dtype}"
    return f"{best['name']}: {how} --target ..."
