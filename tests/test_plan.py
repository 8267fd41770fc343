"""Plans from shapes: what is counted by hand, and what the compiler says."""

import dataclasses
import math

import jax
import pytest

from specjax import cli, plan, roofline
from specjax.drafters import base
from specjax.sharding import MeshShape
from specjax.transformer import TransformerConfig

CONFIG = TransformerConfig(256, 64, 6, 4, 2, 16, 128, max_positions=512)
JOB = plan.Job(
    CONFIG, "eagle", MeshShape(2, 2, 2), batch_size=8, length=64, context=128
)


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """AdamW of optax raises a float; float32 drafters read bfloat16 features."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def made():
    return plan.Plan(JOB)


def test_weights_are_counted_by_device(made):
    D, L, V = 64, 6, 256
    layer = D * 16 * (4 + 2 + 2) + 4 * 16 * D + 3 * D * 128
    matrices, norms = 2 * V * D + L * layer, (2 * L + 1) * D
    # Norms are whole on each of the 8; matrices are split over fsdp x tensor = 4.
    assert made.bytes(made.params) == 2 * (matrices // 4 + norms)
    assert made.bytes(made.state) == 2 * made.bytes(made.draft_params) + 8
    assert made.cache_bytes == 2 * 2 * L * (8 // 4) * (2 // 2) * 256 * 16 + 8 // 4 * 4


def test_flops_of_the_target_are_two_a_weight_and_token(made):
    D, L, T = 64, 6, 64
    layer = D * 16 * (4 + 2 + 2) + 4 * 16 * D + 3 * D * 128
    attending = 2 * T * 2 * 4 * 16  # scores and sums of 4 heads over T keys
    assert made.flops["target"] == L * (2 * layer + attending)


def drafter_flops(gamma):
    return plan.Plan(dataclasses.replace(JOB, fields=(("gamma", gamma),))).flops


def test_flops_of_a_step_are_without_what_is_only_logged():
    """EAGLE drafts gamma tokens for its acceptance, which a step does not compute."""
    assert drafter_flops(2) == drafter_flops(4)


def test_flops_of_a_step_are_with_what_is_computed_again(monkeypatch):
    D, V = 64, 256
    once = drafter_flops(2)["drafter"]
    monkeypatch.setattr(base, "SCORES", 8 * 64 * V / 8 / 4)  # four parts on 8 devices
    jax.clear_caches()
    again = drafter_flops(2)["drafter"]
    jax.clear_caches()
    assert again - once == 2 * 2 * D * V  # scores of drafter and target


@pytest.mark.slow
def test_programs_hold_what_they_are_given(made):
    texts = 8 // 4 * 64 * (4 + 1)
    assert made.features.arguments == made.bytes(made.params) + texts
    assert made.step.arguments > made.bytes(made.draft_params) + made.bytes(made.state)
    assert made.step.results < 1024  # parameters and state take the old ones' place
    assert made.round.arguments > made.cache_bytes + made.bytes(made.params)
    for program in (made.features, made.step, made.round):
        assert program.temporary > 0


def test_features_are_the_taps_and_the_last_state(made):
    D, V, taps = 64, 256, len(made.drafter.taps)
    assert made.stored("bfloat16") == 2 * D * (taps + 1)
    assert made.stored("int8") == (D + 4) * (taps + 1)
    assert made.stored("logits") == 2 * (D * (taps + 1) + V)


@pytest.mark.slow
def test_modes_that_fit_come_first_and_the_fastest_of_them(made):
    modes = made.modes()
    assert [m.name for m in modes if not m.offered] == ["cached with logits"]
    fitting = [m.hours for m in modes if m.fits and m.offered]
    assert fitting == sorted(fitting)
    assert len(fitting) == 3
    small = dataclasses.replace(roofline.CHIPS["v5p"], memory=1e3)
    tight = plan.Plan(dataclasses.replace(JOB, chip=small))
    tight.features, tight.step, tight.flops = made.features, made.step, made.flops
    assert not any(m.fits for m in tight.modes())
    look, step = (
        made.seconds(x) * JOB.tokens / (8 * 64) / 3600 for x in ("target", "drafter")
    )
    flying = next(m for m in modes if m.name == "on the fly")
    assert flying.hours == pytest.approx(JOB.epochs * (look + step))


@pytest.mark.slow
def test_an_eighth_of_the_devices_takes_eight_times_as_long(made):
    one = plan.Plan(dataclasses.replace(JOB, mesh=MeshShape()))
    long = dataclasses.replace(roofline.CHIPS["v5p"], bandwidth=math.inf)
    for p in (one, made):
        p.job = dataclasses.replace(p.job, chip=long)
    assert one.seconds("target") == pytest.approx(8 * made.seconds("target"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"length": 1024}, "more than the model's 512 positions"),
        ({"batch_size": 3, "length": 63}, "do not divide over data x fsdp = 4"),
        ({"epochs": 0}, "epochs >= 1"),
        ({"tokens": 0.0}, "tokens > 0"),
        ({"tokens": math.inf}, "tokens > 0 and finite, got inf"),
        ({"compute_share": 0.0}, "compute_share is a share .*; got 0.0"),
        ({"bandwidth_share": math.nan}, "bandwidth_share is a share .*; got nan"),
    ],
)
def test_jobs_that_cannot_be(change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(JOB, **change)


def test_a_drafter_that_trains_its_target_is_refused():
    with pytest.raises(ValueError, match="trains the target too"):
        plan.Plan(dataclasses.replace(JOB, drafter="medusa2"))


def test_the_command(tmp_path, capsys):
    assert jax.device_count() == 8  # JAX has started: the command takes what there is
    shape = ("--target", "tiny", "--drafter", "medusa", "--mesh", "fsdp=2,tensor=2")
    size = ("--length", "64", "--context", "64", "--json", str(tmp_path / "p.json"))
    cli.main(["plan", *shape, *size, "--no-serving"])
    said = capsys.readouterr().out
    assert "on the fly: specjax train medusa --mesh fsdp=2,tensor=2" in said
    assert (tmp_path / "p.json").is_file()
    for wrong, says in (
        (["--chip", "abacus"], "unknown chip 'abacus'"),
        (["--batch-size", "0"], "batch_size >= 1, got 0"),
        (["--mesh", "fsdp=16"], "needs 16 devices"),
        (["--target", "qwen9"], "unknown model 'qwen9'"),
        (["--drafter", "mezusa"], "mezusa"),
        (["--topology", "v5p:2x2x1"], "could not be described"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["plan", *shape, *size, *wrong])
        assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "drafter", "active"),
    [("llama-3.1-70b", "eagle3", 68.4e9), ("deepseek-v3", "mtp", 36.6e9)],
)
def test_large_targets_compile_from_their_shape_alone(model, drafter, active):
    """No weight exists; flops are two a weight that a token uses, and its attention."""
    job = plan.Job(roofline.MODELS[model], drafter, MeshShape(fsdp=4, tensor=2))
    large = plan.Plan(job)
    arguments = large.features.arguments
    assert arguments == large.bytes(large.params) + 8 // 4 * 2048 * 5
    whole = sum(2 * x.size for x in jax.tree.leaves(large.params))
    assert whole / 8 < arguments < 1.1 * whole / 8
    _, per_token = roofline.attention(job.config, job.length)
    assert large.flops["target"] == pytest.approx(2 * active + per_token, rel=0.02)
