"""Bytes, flops and seconds of published shapes against numbers worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import roofline, targets, work
from specjax.drafters import REGISTRY
from specjax.mla import DeepSeekConfig
from specjax.roofline import CHIPS, MODELS, Chip, Plan, Setup
from specjax.transformer import TransformerConfig

UNIT = Chip(flops=1e12, bandwidth=1e9, memory=1e15, link=2e9)
SHED = dataclasses.replace(UNIT, memory=1e9)
IDEAL = Setup(UNIT, context=512, bandwidth_share=1.0, compute_share=1.0, overhead=0.0)
SMALL = TransformerConfig(1000, 64, 3, 8, 2, 16, 96, max_positions=4096)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        pytest.param("llama-3.1-70b", 70_553_706_496, marks=pytest.mark.slow),
        pytest.param("qwen3-8b", 8_190_735_360, marks=pytest.mark.slow),
    ],
)
def test_a_published_shape_has_the_published_parameters(name, params):
    plan = Plan(MODELS[name], IDEAL)
    assert plan.num_params == params


def test_a_dense_pass_reads_every_matrix_once_and_multiplies_it():
    """The table of embeddings is looked up, not multiplied; norms are left out."""
    layer = 64 * (8 + 2 * 2) * 16 + 8 * 16 * 64 + 3 * 64 * 96
    matrices = 3 * layer + 1000 * 64
    one = Plan(SMALL, IDEAL).one
    assert one.weights == matrices
    assert one.flops == 2 * matrices
    assert one.reductions == 2 * 3 + 1
    assert one.times(5).flops == 10 * matrices


def test_a_gqa_cache_is_read_whole_by_each_row():
    """3 layers x 512 slots x keys and values of 2 heads of 16 numbers."""
    numbers, flops = roofline.attention(SMALL, 512)
    assert numbers == 3 * 512 * 2 * 2 * 16
    assert flops == 3 * 512 * 8 * (2 * 16 + 2 * 16)


def test_a_window_bounds_what_a_layer_reads():
    local = dataclasses.replace(SMALL, windows=(128, None, 128))
    assert roofline.attention(local, 512)[0] == (128 + 512 + 128) * 64


def test_latent_attention_reads_one_latent_for_all_heads():
    """DeepSeek-V3: 61 x (512 + 64) numbers a token, queries of 128 heads over them."""
    numbers, flops = roofline.attention(MODELS["deepseek-v3"], 1000)
    assert numbers == 1000 * 61 * 576
    assert flops == 1000 * 61 * 128 * 2 * (576 + 512)


@pytest.mark.parametrize("layers", [4, pytest.param(61, marks=pytest.mark.slow)])
def test_deepseek_touches_its_active_experts(layers):
    """Whole, 671 B parameters, of which one token multiplies 37 B."""
    config = dataclasses.replace(MODELS["deepseek-v3"], num_layers=layers)
    plan, sparse = Plan(config, IDEAL), layers - 3
    expert = 3 * 7168 * 2048
    assert plan.one.touched(8) == pytest.approx(sparse * 8 * expert)
    latent = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    dense = layers * latent + 3 * 3 * 7168 * 18432 + sparse * (expert + 256 * 7168)
    assert plan.one.weights == dense + 7168 * 129280
    active = plan.one.weights + sparse * 8 * expert
    assert plan.one.flops == pytest.approx(2 * active, rel=1e-6)
    # A shared expert and those that are chosen are summed before their all-reduce.
    assert plan.one.reductions == 2 * layers + 1
    if layers == 61:
        assert plan.num_params == pytest.approx(671.03e9, rel=1e-4)
        assert 36.5e9 < active < 37.5e9


def test_more_tokens_touch_more_experts_until_all_are():
    each = work.Work(experts=[(8.0, 256, 1.0)])
    assert each.touched(8) == pytest.approx(8)
    assert each.times(2).touched(8) == pytest.approx(256 * (1 - (1 - 8 / 256) ** 2))
    assert each.times(4096).touched(8) == pytest.approx(256)


def test_a_pass_is_bound_by_memory_and_then_by_its_products():
    """8,030 M parameters at 2 bytes over 3.35 TB/s; 2 flops each over 989 TFLOP/s."""
    setup = dataclasses.replace(IDEAL, chip=CHIPS["h100"])
    plan = Plan(MODELS["llama-3.1-8b"], setup)
    matrices = 32 * 218_103_808 + 128256 * 4096
    few, many = plan.target_pass(1), plan.target_pass(4096)
    assert (few.bound, many.bound) == ("memory", "compute")
    assert few.weights == pytest.approx(2 * matrices / 3.35e12)
    assert many.weights == pytest.approx(4096 * 2 * matrices / 989e12)
    assert few.cache == pytest.approx(32 * 512 * 2 * 1024 * 2 / 3.35e12)
    assert few.collectives == few.overhead == 0


def test_chips_share_weights_and_pay_for_their_all_reduces():
    setup = dataclasses.replace(IDEAL, chips=4, collective=1e-6)
    one, four = Plan(SMALL, IDEAL).target_pass(3), Plan(SMALL, setup).target_pass(3)
    assert four.weights == pytest.approx(one.weights / 4)
    assert four.cache == pytest.approx(one.cache / 2)  # two key heads
    each = 1e-6 + 2 * 3 / 4 * 3 * 64 * 2 / 1e9  # link: 1 GB/s one way
    assert four.collectives == pytest.approx(7 * each)


def test_fewer_bytes_and_smaller_shares_are_in_proportion():
    half = dataclasses.replace(IDEAL, weight_bytes=1.0, bandwidth_share=0.5)
    a, b = Plan(SMALL, IDEAL).target_pass(1), Plan(SMALL, half).target_pass(1)
    assert b.weights == pytest.approx(a.weights)
    assert b.cache == pytest.approx(2 * a.cache)


@pytest.mark.slow
def test_the_stated_shares_give_the_only_table_they_were_set_to():
    """gpt-fast, A100-80GB, batch 1, bfloat16: tokens/s by number of chips."""
    shapes = {
        "7b": TransformerConfig(32000, 4096, 32, 32, 32, 128, 11008),
        "70b": TransformerConfig(32000, 8192, 80, 64, 8, 128, 28672),
    }
    seen = {("7b", 1): 104.9, ("7b", 2): 168.84, ("7b", 4): 254.02, ("7b", 8): 328.43}
    seen |= {("70b", 2): 21.32, ("70b", 4): 38.01, ("70b", 8): 62.50}
    for (name, chips), speed in seen.items():
        setup = Setup(CHIPS["a100"], chips=chips, context=100)
        ours = 1 / Plan(shapes[name], setup).target_pass(1).seconds
        assert ours == pytest.approx(speed, rel=0.11), (name, chips)


def test_a_sequential_draft_reads_its_weights_gamma_times_and_a_block_once():
    plan = Plan(dataclasses.replace(MODELS["llama-3.1-8b"], num_layers=8), IDEAL)
    reads = lambda name, g: plan.draft_work(plan.drafter(name, g)).weights
    D, V, F = 4096, 128256, 14336
    # Eq. 1 and 2 of `eagle`: fc of two widths, one layer, the target's head.
    layer = D * D * 2 + 2 * D * 1024 + 3 * D * F
    once = 2 * D * D + layer + D * V
    assert reads("eagle", 1) == pytest.approx(once, rel=1e-4)  # and embedding rows
    assert reads("eagle", 4) == pytest.approx(4 * once, rel=1e-4)
    # A head of Medusa has a square matrix and a table of its own.
    assert reads("medusa", 3) == 3 * (D * D + D * V)
    assert reads("dflash", 3) == reads("dflash", 9)


def test_queries_as_wide_as_the_stream_are_no_all_reduce():
    """A block drafter has two a layer, one of its fusion and one of the head."""
    for heads in (4, 8):  # 4 x 16 = 64, the width
        config = dataclasses.replace(SMALL, num_layers=8, num_heads=heads)
        plan = Plan(config, IDEAL)
        drafter = plan.drafter("dflash", 3)
        found = plan.draft_work(drafter).reductions
        assert found == 2 * vars(drafter)["num_layers"] + 2


def test_heads_side_by_side_are_one_all_reduce_a_product():
    """Medusa's square matrices and its tables; Hydra's one after the other."""
    plan = Plan(SMALL, IDEAL)
    count = lambda name, g: plan.draft_work(plan.drafter(name, g)).reductions
    assert [count("medusa", g) for g in (1, 3)] == [2, 2]
    assert [count("hydra", g) for g in (1, 3)] == [2, 6]


QUICK = ("draft_model", "eagle", "dspark")


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in REGISTRY],
)
def test_every_drafter_is_planned_from_shapes_alone(name):
    config = dataclasses.replace(SMALL, num_layers=4)
    plan = Plan(config, dataclasses.replace(IDEAL, batch=2))
    row = roofline.judge(plan, name, [0.8], 2, grid=(0.5,))
    assert row["gammas"][-1] <= 2
    assert min(row["c"]) > 0
    assert row["best_speedup"] == max(row["speedup"])
    assert row["by_alpha"][0]["speedup"] <= row["best_speedup"]


def test_a_drafter_of_experts_reads_those_that_its_tokens_touch():
    config = DeepSeekConfig(
        vocab_size=100,
        width=32,
        num_layers=4,
        num_heads=4,
        num_kv_heads=1,
        head_width=8,
        mlp_width=48,
        q_rank=16,
        kv_rank=16,
        nope_width=8,
        value_width=8,
        num_dense_layers=1,
        num_experts=16,
        experts_per_token=2,
        expert_width=8,
        num_groups=4,
        groups_per_token=2,
    )
    plan = Plan(config, IDEAL)
    found = plan.draft_work(plan.drafter("mtp", 1))
    rows = found.experts[0][0]
    assert found.experts[0][1:] == (16, 32 * 16)
    assert rows % 2 == 0  # two experts a token
    assert found.touched(2) < 16 * (32 * 16 + 8 * 32)


def test_all_chips_multiply_and_each_row_has_a_cache():
    """Where sums and not reading are the limit: 1 GFLOP/s, four chips, two rows."""
    slow = dataclasses.replace(IDEAL, chip=dataclasses.replace(UNIT, flops=1e9))
    plan = Plan(SMALL, slow)
    dense, attending = plan.one.flops, roofline.attention(SMALL, 512)[1]
    one = plan.target_pass(8)
    assert one.weights == pytest.approx(8 * dense / 1e9)
    assert one.cache == pytest.approx(8 * attending / 1e9)
    plan.setup = dataclasses.replace(slow, chips=4, batch=2)
    four = plan.target_pass(8)
    assert four.weights == pytest.approx(one.weights / 4)
    assert four.cache == pytest.approx(one.cache / 4)
    plan.setup = dataclasses.replace(IDEAL, batch=3)
    assert plan.target_pass(1).cache == pytest.approx(3 * plan.per_row * 2 / 1e9)


def test_step_by_step_drafts_pay_for_each_pass_and_a_block_for_all_its_tokens():
    """Two rows on two chips; an all-reduce of n tokens moves n x 64 x 2 bytes."""
    setup = dataclasses.replace(IDEAL, chips=2, batch=2, overhead=1.0, collective=0.0)
    plan = Plan(SMALL, setup)
    # Of a pass of EAGLE: its fusion, two of its layer, the head.
    for name, passes, tokens, reductions in (("eagle", 3, 2, 12), ("medusa", 1, 8, 2)):
        part = plan.draft(plan.drafter(name, 3))
        assert part.overhead == passes
        each = tokens * 64 * 2 / 1e9
        assert part.collectives == pytest.approx(reductions * each)


def test_a_commit_is_part_of_a_draft():
    """A block drafter fuses the features there and makes its keys and values."""
    plan = Plan(dataclasses.replace(SMALL, num_layers=8), IDEAL)
    drafter = plan.drafter("dflash", 3)
    tree = plan.draft_params(drafter)
    matrices = sum(x.size for x in jax.tree.leaves(tree) if x.ndim > 1)
    layers = [tree[n] for n in tree if n.startswith("layer_")]
    again = sum(layer["attention"]["kv"].size for layer in layers)
    assert plan.draft_work(drafter).weights == matrices + again + 1000 * 64


def test_ratios_are_to_a_plain_round_of_all_rows():
    chip = Chip(flops=1e9, bandwidth=1e9, memory=1e15, link=2e9)
    plan = Plan(SMALL, dataclasses.replace(IDEAL, chip=chip, batch=2))
    row = roofline.judge(plan, "medusa", [0.8], 2)
    plain = plan.target_pass(2).seconds
    wide = [plan.target_pass(n).seconds / plain for n in (4, 6)]
    assert wide[0] > 1.5
    np.testing.assert_allclose(row["v"], wide)
    drafts = [plan.draft(plan.drafter("medusa", g)).seconds for g in (1, 2)]
    np.testing.assert_allclose(row["c"], np.array(drafts) / plain)


def test_memory_holds_the_drafter_the_copies_of_a_cache_and_no_more_than_a_window():
    whole = Plan(SMALL, IDEAL)
    local = Plan(dataclasses.replace(SMALL, windows=(128, None, 128)), IDEAL)

    def fits(plan, num_bytes, drafter_params=0, **fields):
        chip = dataclasses.replace(UNIT, memory=num_bytes / fields.get("chips", 1))
        plan.setup = dataclasses.replace(IDEAL, chip=chip, **fields)
        try:
            plan.check_memory(drafter_params)
        except ValueError:
            return False
        return True

    weights, row = 2.0 * whole.num_params, 2 * 512 * 3 * 2 * 2 * 16
    for plan, needed, options in (
        (whole, weights + row, {}),
        (whole, weights + row + 2000, {"drafter_params": 1000}),
        (whole, weights + 3 * row, {"batch": 3}),
        (whole, weights + 2 * row, {"chips": 4}),  # two key heads: two copies
        (local, weights + row * (128 + 512 + 128) / 1536, {}),
    ):
        assert fits(plan, needed, **options)
        assert not fits(plan, needed - 8, **options)
    assert fits(whole, weights + row)
    with pytest.raises(ValueError, match="GB of weights"):
        roofline.judge(whole, "medusa", [0.8], 1)


def test_a_scan_counts_as_often_as_it_runs_and_branches_once():
    def program(w, cache, x):
        def step(x, _):
            return jax.lax.platform_dependent(
                x, cpu=lambda x: x @ w @ w, default=lambda x: x @ w
            ), x @ cache

        return jax.lax.scan(step, x, None, length=5)

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    found = work.count(program, work.Ends({4}), f32(4, 4), f32(4, 7), f32(2, 4))
    assert (found.weights, found.flops) == (5 * 16, 5 * 2 * 2 * 16)
    assert (found.cache, found.cache_flops) == (5 * 28, 5 * 2 * 2 * 28)
    assert found.reductions == 5


def test_a_broadcast_weight_is_read_once():
    def program(w, cache, x):
        wide = jnp.broadcast_to(w[None], (6, 4, 4)).astype(jnp.bfloat16)
        return jnp.einsum("bi,bij->bj", x, wide)

    x = jax.ShapeDtypeStruct((6, 4), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    found = work.count(program, work.Ends(set()), w, (), x)
    assert (found.weights, found.flops) == (16, 6 * 2 * 16)


def test_a_shape_is_read_from_a_config_alone(tmp_path):
    path = targets.TINY
    assert roofline.model(str(path)) == targets.read_config("tiny")
    text = (path / "config.json").read_text().rstrip().rstrip("}")
    (tmp_path / "config.json").write_text(
        text + ', "quantization_config": {"quant_method": "fp8"}}'
    )
    assert roofline.model(str(tmp_path)) == targets.read_config("tiny")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: roofline.model("llama-9"), "unknown model 'llama-9'; known: llama"),
        (lambda: roofline.model("/no/such"), "no config.json at /no/such"),
        (lambda: dataclasses.replace(IDEAL, chips=0), "chips >= 1, got 0"),
        (lambda: dataclasses.replace(IDEAL, compute_share=2.0), "at most 1; got 2"),
        (
            lambda: dataclasses.replace(IDEAL, cache_bytes=0.0),
            "cache_bytes must be > 0",
        ),
        (
            lambda: dataclasses.replace(IDEAL, collective=-1.0),
            "collective must be >= 0",
        ),
        (
            lambda: Plan(SMALL, dataclasses.replace(IDEAL, context=5000)),
            "context 5000 is more than the model's 4096",
        ),
        (
            lambda: Plan(MODELS["llama-3.2-1b"], Setup(SHED)).check_memory(),
            "2 GB of weights and 0 GB of cache do not fit in 1 x 1 GB",
        ),
        (
            lambda: roofline.judge(Plan(SMALL, IDEAL), "medusa:qwen3-8b", [0.8], 2),
            "only draft_model and pard",
        ),
        (
            lambda: roofline.judge(Plan(SMALL, IDEAL), "eagle3", [0.8], 2, 2000),
            "1 to 1000 ids here, got 2000",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(make, message):
    with pytest.raises((ValueError, OSError), match=message):
        make()


def test_an_own_draft_model_has_its_own_width():
    plan = Plan(dataclasses.replace(SMALL, vocab_size=128256), IDEAL)
    row = roofline.judge(plan, "draft_model:llama-3.2-1b", [0.8], 2)
    assert row["params"] == 1_235_814_400
    assert np.all(np.diff(row["c"]) > 0)


def test_the_gradient_of_experts_is_counted_as_the_product_it_is():
    """Rows [R D] and [R F] to [X D F]: as many flops as the product forward."""
    R, D, F, X = 6, 4, 5, 3
    sizes = jax.ShapeDtypeStruct((X,), jnp.int32)
    rows, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((R, D), (X, D, F)))
    loss = lambda w, x, sizes: jnp.sum(jax.lax.ragged_dot(x, w, sizes) ** 2)
    forward = lambda weights, cache, *args: loss(*args)
    back = lambda weights, cache, *args: jax.grad(loss)(*args)
    ends = work.Ends(set())
    one = work.count(forward, ends, (), (), w, rows, sizes).flops
    assert one == 2 * R * D * F
    assert work.count(back, ends, (), (), w, rows, sizes).flops == 2 * one


def test_products_that_no_output_needs_are_not_counted():
    """As of a loss whose logs are left out of its gradient."""

    def loss(w):
        return jnp.sum(w @ w), w @ w @ w

    step = lambda weights, cache: jax.jit(jax.grad(lambda w: loss(w)[0]))(weights)
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = work.count(step, work.Ends(set()), w, ())
    assert found.flops == 2 * 2 * 8**3  # the sum needs no product, its gradient two
