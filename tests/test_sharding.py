"""The same program on one device and on eight (fake ones, see conftest)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import corpus, sharding, testing, training
from specjax.generate import Model, Weights, advance, generate, start
from specjax.sampling import Sampling
from specjax.sharding import MeshShape
from specjax.targets.base import Pretrained
from specjax.targets.scanned import Scanned
from specjax.tree import Tree

MESHES = {
    "1x1": MeshShape(),
    "8x1": MeshShape(data=8),
    "fsdp": MeshShape(fsdp=8),
    "2x4": MeshShape(data=2, tensor=4),
    "2x2x2": MeshShape(data=2, fsdp=2, tensor=2),
    "1x8": MeshShape(tensor=8),
}
SHAPE = {"num_heads": 8, "num_kv_heads": 8, "width": 32, "mlp_width": 32}


def mesh_of(name):
    shape = MESHES[name]
    return shape.make(jax.devices()[: shape.size])


def tiny(name, **fields):
    target, params = testing.tiny_target(**SHAPE)
    drafter, weights = testing.tiny_drafter(name, target, params, **fields)
    return target, params, drafter, weights


def test_a_mesh_is_read_from_its_name():
    assert MeshShape.parse("data=2,fsdp=4,tensor=4") == MeshShape(2, 4, 4)
    assert MeshShape.parse("") == MeshShape()
    for wrong in ("data", "pipe=2", "data=0", "data=2,data=2", "data=-1"):
        with pytest.raises(ValueError, match="mesh"):
            MeshShape.parse(wrong)
    with pytest.raises(ValueError, match="needs 16 devices; there are 8"):
        MeshShape(data=16).make()


def test_axes_that_do_not_divide_a_dimension_are_left_out():
    mesh = mesh_of("2x4")
    assert sharding.fit(("tensor", None), (8, 3), mesh) == P("tensor")
    assert sharding.fit(("tensor", "fsdp"), (6, 4), mesh) == P()
    assert sharding.fit((("data", "fsdp"), None), (4, 1), mesh) == P(("data", "fsdp"))


@pytest.mark.slow
def test_every_large_parameter_of_target_and_drafter_is_split():
    """On 2 x 2 x 2 no device holds more than half of a matrix."""
    mesh = mesh_of("2x2x2")
    for name in ("medusa", "eagle3", "dflash2", "p_eagle", "gemma4_mtp"):
        _, params, _, weights = tiny(name)
        for tree in (params, weights):
            split = sharding.shardings(tree, mesh)
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                at = split
                for entry in path:
                    at = at[entry.key]
                part = np.prod(at.shard_shape(x.shape))
                if x.ndim > 1 and x.size > 256:
                    assert part <= x.size / 2, (name, path, x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8x1", "2x4", "2x2x2", "1x8"])
@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_texts_are_those_of_one_device(mesh, name):
    """A drafter that goes step by step on a chain, and one of heads on a tree."""
    target, params, drafter, weights = tiny(name)
    if name == "medusa":
        drafter = dataclasses.replace(drafter, topology=Tree.full(2, 2))
    model = Model(target, drafter, Sampling(temperature=1.0))
    prompts = [[1, 2, 3, 4 + i] for i in range(8)]
    options = {"max_new_tokens": 12, "key": jax.random.key(3)}
    alone = generate(model, Weights(params, weights), prompts, **options)
    on = mesh_of(mesh)
    with sharding.use(on):
        placed = Weights(sharding.place(params, on), sharding.place(weights, on))
        found = generate(model, placed, prompts, **options)
    assert found.tokens == alone.tokens
    assert np.array_equal(found.trace.num_accepted, alone.trace.num_accepted)


def train_on(name, mesh, scanned=False, **options):
    target, params = testing.tiny_target(**SHAPE)
    drafter, _ = testing.tiny_drafter(name, target, params)
    if scanned:
        target = Scanned(target)
        params = target.stack(params)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (16, 12)).astype(np.int32)
    texts = corpus.Texts(tokens, rng.random(tokens.shape) < 0.8)
    config = training.TrainConfig(steps=3, batch_size=8, log_every=1)
    losses = []
    with jax.numpy_dtype_promotion("standard"):
        trained = training.train(
            Pretrained("micro", target, params, None, ()),
            drafter,
            texts,
            config,
            mesh=mesh,
            log=lambda step, values: losses.append(values["loss"]),
            **options,
        )
    return trained, losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa2"])
@pytest.mark.parametrize("mesh", ["2x4", "8x1", "fsdp", "1x8"])
def test_a_training_is_that_of_one_device(mesh, name):
    alone, losses = train_on(name, None)
    on = mesh_of(mesh)
    split, found = train_on(name, on)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-4)
    wanted = sharding.shardings(split, on)
    same = lambda x, at: x.sharding.is_equivalent_to(at, x.ndim)
    assert all(jax.tree.leaves(jax.tree.map(same, split, wanted)))


@dataclasses.dataclass(frozen=True)
class Square:
    """Its loss is the mean of its weights squared."""

    def loss(self, params, shared, batch, key):
        return jnp.mean(params["head"] ** 2), {}


def test_a_step_splits_its_weights_and_moments_however_they_came():
    """XLA leaves whole what came whole: not what the step asks for."""
    on, config = mesh_of("2x2x2"), training.TrainConfig()
    with sharding.use(on), jax.numpy_dtype_promotion("standard"):
        whole = jax.device_put({"head": jnp.ones((8, 4))}, NamedSharding(on, P()))
        state = jax.jit(config.optimiser().init)(whole)
        key = jax.random.key(0)
        after = training.train_step(Square(), config, whole, state, None, None, key)
    split = [x for x in jax.tree.leaves(after[:2]) if x.shape == (8, 4)]
    assert [x.sharding.spec for x in split] == [P("tensor", "fsdp")] * 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x2x2", "fsdp"])
def test_a_training_on_scanned_layers_is_that_of_one_device(mesh):
    alone, losses = train_on("eagle3", None)
    for on in (None, mesh_of(mesh)):
        found, same = train_on("eagle3", on, scanned=True)
        np.testing.assert_allclose(same, losses, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-4)


@pytest.mark.slow
def test_a_scanned_layer_is_gathered_alone():
    """Its weights, when it is their turn: no all-gather is of a whole stack."""
    target = Scanned(testing.tiny_target(**SHAPE)[0])
    on = mesh_of("fsdp")
    with sharding.use(on):
        params = sharding.place(target.init(jax.random.key(0)), on)
        tokens = jnp.zeros((8, 8), jnp.int32)
        text = jax.jit(target).lower(params, tokens).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    qkv = params["layers"]["0"]["attention"]["qkv"].shape
    shown = lambda shape: f"[{','.join(map(str, shape))}]"
    assert any(shown(qkv[1:]) in line for line in gathers)
    assert not any(shown(qkv) in line for line in gathers)


@pytest.mark.slow
def test_a_pass_over_a_split_cache_gathers_no_cache():
    """Writes, reads and the compaction of a path stay on the device of their rows."""
    target, params, drafter, weights = tiny("medusa")
    on = mesh_of("2x4")
    model = Model(target, drafter, Sampling(temperature=1.0))
    with sharding.use(on):
        placed = Weights(sharding.place(params, on), sharding.place(weights, on))
        prompts = [[1, 2, 3 + i] for i in range(8)]
        progress = start(model, placed, prompts, max_new_tokens=8)
        slots = progress.cache.k[0]
        assert slots.sharding.shard_shape(slots.shape) == (4, 2, *slots.shape[2:])
        text = (
            advance.lower(model, placed, progress, jnp.asarray(2)).compile().as_text()
        )
    S, E = slots.shape[2:]
    wide = [
        line
        for line in text.splitlines()
        if "all-gather" in line and f",{S},{E}]" in line.split("=")[1]
    ]
    assert not wide


def test_fingerprints_see_the_content_and_not_the_place():
    _, params, _, _ = tiny("medusa")
    first = sharding.fingerprint(params)
    for mesh in ("2x4", "2x2x2"):
        assert sharding.fingerprint(sharding.place(params, mesh_of(mesh))) == first
    x = np.asarray(params["embed"]).copy()
    x[[0, 1]] = x[[1, 0]]
    assert sharding.fingerprint(params | {"embed": jnp.asarray(x)}) != first
    swapped = sharding.fingerprint({"a": x})
    x[0, 0] = np.nextafter(x[0, 0], np.float32(9))
    assert sharding.fingerprint({"a": x}) != swapped


def test_fingerprints_of_stacked_layers_are_those_of_layers_one_by_one():
    """Those that are recorded in the checkpoints and caches of older versions."""
    layers = [{"w": np.full((4, 8), 2.0**i, np.float32)} for i in range(12)]
    embed = {"embed": np.arange(6, dtype=np.float32).reshape(3, 2)}
    recorded = "fb9a22598935739fbbbd7bf8afc3317bd6e61c140cc216bb58f39ac2e4790f91"
    alone = embed | {f"layer_{i}": layer for i, layer in enumerate(layers)}
    assert sharding.fingerprint(alone) == recorded
    join = lambda *x: np.stack(x)
    runs = [jax.tree.map(join, *part) for part in (layers[:1], layers[1:])]
    stacked = embed | {"layers": {str(n): run for n, run in enumerate(runs)}}
    assert sharding.fingerprint(stacked) == recorded
    assert sharding.fingerprint(sharding.place(stacked, mesh_of("2x2x2"))) == recorded


def test_a_pass_split_over_heads_has_two_all_reduces_a_layer():
    """What `roofline` counts, and one for the look-up in a split table."""
    target, params = testing.tiny_target(num_layers=2, **SHAPE)
    on = MeshShape(tensor=4).make(jax.devices()[:4])
    with sharding.use(on):
        placed = sharding.place(params, on)
        tokens = jnp.zeros((2, 8), jnp.int32)
        run = jax.jit(lambda p, t: target.logits(p, target(p, t).hidden))
        text = run.lower(placed, tokens).compile().as_text()
    assert text.count(" all-reduce(") == 2 * 2 + 1
    assert " all-gather(" not in text


def test_experts_and_layers_are_split_as_their_products_need():
    """Experts over `tensor`, in a stack of layers too, and their moments alike."""
    of = lambda *path, shape: sharding.axes_of(path, shape)
    assert of("mlp", "down", shape=(8, 16, 32)) == ("tensor", None, "fsdp")
    assert of("mlp", "gate_up", shape=(8, 32, 64)) == ("tensor", "fsdp", None)
    assert of("mlp", "gate_up", shape=(2, 32, 64)) == (None, "tensor", "fsdp")
    stacked = of("layers", "0", "mlp", "down", shape=(3, 16, 32))
    assert stacked == (None, "fsdp", "tensor")
    assert of("0", "mu", "attention", "q", shape=(8, 4, 16)) == ("tensor", None, "fsdp")
    assert of("attention", "q", shape=(2, 4, 4, 16)) == ("tensor", None, None, "fsdp")
    assert of("attention", "kv", shape=(2, 8, 4, 16)) == (None, "tensor", None, "fsdp")
