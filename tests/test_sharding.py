"""The same program on one device and on eight (fake ones, see conftest)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from specjax import corpus, sharding, testing, training
from specjax.generate import Model, Weights, advance, generate, start
from specjax.sampling import Sampling
from specjax.sharding import MeshShape
from specjax.targets.base import Pretrained
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
    assert sharding.fit(("tensor", None), (8, 3), mesh) == P("tensor", None)
    assert sharding.fit(("tensor", "fsdp"), (6, 4), mesh) == P(None, None)
    assert sharding.fit((("data", "fsdp"), None), (4, 1), mesh) == P(
        ("data", "fsdp"), None
    )


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


@pytest.mark.parametrize("mesh", ["8x1", "2x4", "2x2x2", "1x8"])
@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_texts_are_those_of_one_device(mesh, name):
    target, params, drafter, weights = tiny(name)
    drafter = drafter if name == "eagle" else drafter
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
