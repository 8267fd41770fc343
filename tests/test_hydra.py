"""Hydra and Hydra++ against numbers recorded from the reference code."""

import dataclasses
import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft_tree, testing
from specjax.drafters.base import Batch
from specjax.drafters.hydra import Hydra, HydraPlus
from specjax.generate import Model, Weights, autoregressive, generate
from specjax.sampling import GREEDY, Sampling
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig
from specjax.tree import DynamicTree, Tree
from specjax.verify import Verdict

TEXT = [3, 7, 1, 9, 4, 5, 11, 2]
CONFIG = TransformerConfig(
    vocab_size=32,
    width=24,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_width=6,
    mlp_width=32,
    norm_eps=1e-5,
)
TARGET = Llama(CONFIG)
FORMULA = {"factor": 0.3, "quadratic": 0.3}
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
ALL_TERMS = {"w_lm": 1.0, "w_teacher": 1.0, "w_rec": 1.0, "dropout": 0.0}
RIGHT = {
    "hydra": {
        "logits": [
            (-2.662296, -0.901261, -0.375750, 1.297446),
            (1.165167, 0.414611, -0.128008, 0.552160),
            (-0.038067, -0.312352, -1.044950, 0.805394),
        ],
        "sum": 889.943780,
        "lm": (4.537646, 3.981395, 4.287892),
        "teacher": (4.756499, 4.806579, 4.074741),
        "rec": (0.913079, 0.880564, 0.776376),
        "tree": [31, 7, 3, 4, 3, 12],
    },
    "hydra_plus": {
        "logits": [
            (0.663285, -2.633184, 2.425892, -1.711790),
            (-0.839496, -0.941303, -0.852266, 1.979556),
            (1.466739, 1.542542, 2.473569, 1.840588),
        ],
        "sum": 1200.961008,
        "lm": (4.745788, 4.423356, 3.804626),
        "teacher": (5.214140, 4.338043, 4.471033),
        "rec": (0.959944, 0.958721, 1.154432),
        "tree": [5, 15, 2, 10, 10, 3],
    },
}


def head_of(tensor, k):
    """Tensors in the order of the checkpoint; the tied block is stored once."""
    D, V, X = 24, 32, 24 * (k + 1)
    w, b = tensor("", (D, X)), tensor("", (D,))
    r, rb = tensor("", (D, X)), tensor("", (D,))
    names = ("rest", (D, D)), ("rest_bias", (D,)), ("vocab", (V, D))
    later = {name: tensor("", shape) for name, shape in names}
    first = {"first": np.stack([r, w]), "first_bias": np.stack([rb, b])}
    return first | later | {"vocab_bias": tensor("", (V,))}


def prefix_of(tensor):
    return {
        "layer": {
            "input_norm": {"scale": tensor("norm.weight", (24,))},
            "attention": golden.attention_of(tensor, "", 24, 4, 2, 6, False),
            "post_norm": {"scale": tensor("norm.weight", (24,))},
            "mlp": golden.mlp_of(tensor, "", 24, 32),
        },
        "norm": {"scale": tensor("norm.weight", (24,))},
    }


class Kit:
    """The recorded fixture: a target, a drafter of three heads, its weights."""

    def __init__(self, name):
        self.right = RIGHT[name]
        plus = name == "hydra_plus"
        self.cls = HydraPlus if plus else Hydra
        self.drafter = self.make()
        tensor = golden.counted(500 if plus else 400, **FORMULA)
        prefix = {"prefix": prefix_of(tensor)} if plus else {}
        heads = {f"head_{k}": head_of(tensor, k) for k in (1, 2, 3)}
        self.numpy = prefix | heads
        self.weights = golden.to_jax(self.numpy)
        tensors = golden.llama(golden.counted(0, delta=1.25, **FORMULA), CONFIG)
        self.params = golden.to_jax(tensors)
        self.shared = TARGET.shared(self.params)
        run = jax.jit(lambda p, t: TARGET(p, t, taps=(-1,)))
        self.out = run(self.params, jnp.array([TEXT]))

    def make(self, **fields):
        layers = 3 if self.cls is HydraPlus else 2
        fields = {"gamma": 3, "num_layers": layers} | ALL_TERMS | fields
        return self.cls.for_target(CONFIG, None, **fields)

    def state(self, drafter):
        text, length = jnp.array([TEXT]), jnp.array([8])
        args = self.weights, self.shared, text, length, self.out.features
        return jax.jit(drafter.prefill, static_argnums=5)(*args, 32)

    def draft(self, sampling=GREEDY, anchor=17, seeds=(0,), **fields):
        drafter = self.make(**fields)
        state = jax.tree.map(
            lambda x: jnp.repeat(x, len(seeds), axis=0), self.state(drafter)
        )
        anchors = jnp.full(len(seeds), anchor)
        keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
        draft = jax.jit(drafter.draft, static_argnums=4)
        return draft(self.weights, self.shared, state, anchors, sampling, keys)[0]

    def batch(self, mask):
        return Batch(
            jnp.array([TEXT]),
            jnp.asarray(mask)[None],
            self.out.features,
            self.out.hidden,
        )

    def loss(self, mask, **fields):
        run = jax.jit(self.make(**fields).loss)
        return run(self.weights, self.shared, self.batch(mask), jax.random.key(0))


@functools.cache
def make_kit(name):
    return Kit(name)


@pytest.fixture(params=list(RIGHT))
def kit(request):
    return make_kit(request.param)


def head_by_loops(kit, k, f, path):
    """Eq. 1 to 4 in float64; `path` is the anchor and the tokens drafted after it."""
    p = kit.numpy[f"head_{k}"]
    embed = np.asarray(kit.params["embed"], np.float64)
    u = np.concatenate([np.asarray(f, np.float64), *(embed[x] for x in path)])
    r, w = p["first"]
    rb, wb = p["first_bias"]
    z = r @ u + rb + golden.silu(w @ u + wb)
    for _ in range(kit.drafter.num_layers - 1):
        z = z + golden.silu(p["rest"] @ z + p["rest_bias"])
    return p["vocab"] @ z + p["vocab_bias"]


def test_logits_are_those_recorded(kit):
    """All rows at once; the reference lets the text's end wrap around."""

    @jax.jit
    def run(weights, shared, features):
        g, _ = kit.drafter.context(weights, features)
        embed = lambda k: shared.embed[np.roll(np.array([TEXT]), -k, axis=1)]
        read = jnp.stack([g, *(embed(k) for k in (1, 2, 3))], axis=2)
        return [kit.drafter.head(weights, shared, k, read)[1] for k in (1, 2, 3)]

    total = 0.0
    for logits, right in zip(
        run(kit.weights, kit.shared, kit.out.features), kit.right["logits"], strict=True
    ):
        np.testing.assert_allclose(logits[0, 2, :4], right, atol=5e-5)
        total += float(np.abs(logits).sum())
    assert total == pytest.approx(kit.right["sum"], abs=5e-3)


def test_the_prefix_layer_ends_as_recorded():
    kit = make_kit("hydra_plus")
    right = [0.523229, 1.782790, 0.040777, 0.844559]
    feature = kit.state(kit.drafter).feature
    np.testing.assert_allclose(feature[0, :4], right, atol=5e-5)


def test_the_prefix_layer_reads_a_text_in_pieces():
    """A prompt of three, then rounds that commit two tokens and three: 3, 5, 8."""
    kit = make_kit("hydra_plus")
    drafter, args = kit.drafter, (kit.weights, kit.shared)
    text, f = jnp.array([TEXT]), kit.out.features
    prefill = jax.jit(drafter.prefill, static_argnums=5)
    state = prefill(*args, text[:, :3], jnp.array([3]), f[:, :3], 32)
    commit = jax.jit(drafter.commit)
    for at, count in ((3, 2), (5, 3)):
        assert state.cache.length.tolist() == [at]
        verdict = Verdict(jnp.array([count - 1]), text[:, :4], jnp.ones(1, bool))
        rows = jnp.arange(at, at + 4) % 8  # what follows the accepted is not read
        state = commit(*args, state, verdict, text[:, rows], f[:, rows])
    assert state.cache.length.tolist() == [8]
    right = kit.state(drafter).feature
    np.testing.assert_allclose(state.feature, right, atol=2e-5)


def test_what_no_label_depends_on_changes_no_bit_of_the_loss(kit):
    """Labels 3 to 5 end before position 6, where everything is overwritten."""
    mask = (np.arange(8) >= 3) & (np.arange(8) <= 5)
    run = jax.jit(kit.make(dropout=0.5).loss)
    batch, late = kit.batch(mask), jnp.arange(8)[None] > 5
    other = Batch(
        jnp.where(late, 21, batch.tokens),
        batch.mask,
        jnp.where(late[..., None], 9.0, batch.features),
        jnp.where(late[..., None], -9.0, batch.hidden),
    )
    ours, theirs = (
        run(kit.weights, kit.shared, b, jax.random.key(0)) for b in (batch, other)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_losses_are_those_recorded(kit):
    """Labels are all ids but the first three."""
    value, logs = kit.loss(np.arange(8) >= 3)
    for name in ("lm", "teacher", "rec"):
        np.testing.assert_allclose(logs[name], kit.right[name], atol=1e-4)
    right = sum(sum(kit.right[name]) for name in ("lm", "teacher", "rec"))
    assert float(value) == pytest.approx(right, abs=5e-4)


def test_trees_are_those_recorded(kit):
    draft = kit.draft(topology=Tree.of_paths(PATHS))
    assert draft.tokens[0].tolist() == kit.right["tree"]


def test_the_public_tree_has_the_recorded_lists_of_children():
    """`mc_sim_7b_63`: of each depth the nodes with children, and how many each has."""
    lists = [
        [10],
        [10, 7, 3, 2, 1, 1, 1, 1, 1, 1],
        [10, 3, 2, 1, 1, 1, 1, 1, 2, 1],
        [2],
    ]
    expanded = [[()], [(i,) for i in range(10)]]
    expanded += [[*((0, i) for i in range(8)), (1, 0), (2, 0)], [(0, 0, 0)]]
    paths = []
    for nodes, counts in zip(expanded, lists, strict=True):
        for node, count in zip(nodes, counts, strict=True):
            paths += [(*node, rank) for rank in range(count)]
    tree = Tree.of_paths(paths)
    assert np.bincount(tree.depths).tolist() == [1, 10, 28, 23, 2]
    levels = draft_tree._levels(tree)
    rows = [[n for n in level if n >= 0] for level in ([0], *levels.tolist())]
    count = lambda node: int(np.sum(tree.children[node] >= 0))
    assert [[count(node) for node in row] for row in rows] == lists


def test_a_head_reads_the_anchor_and_every_token_before_its_own():
    """The worked example A..F: f_2 and D give E, with E give F, and so on."""
    kit = make_kit("hydra")
    out, text = kit.out.features[0], TEXT
    read = [out[2], *kit.shared.embed[jnp.array(text[3:6])]]
    for k in (1, 2, 3):
        _, ours = kit.drafter.head(kit.weights, kit.shared, k, jnp.stack(read)[None])
        right = head_by_loops(kit, k, out[2], text[3 : 3 + k])
        np.testing.assert_allclose(ours[0], right, atol=5e-5)


def test_the_laws_of_a_tree_are_those_of_each_nodes_path(kit):
    for topology in (Tree.of_paths(PATHS), Tree((-1, 0, 0, 0, 2, 2, 3, 4, 6, 6))):
        draft = kit.draft(Sampling(), seeds=range(3), topology=topology)
        f = kit.state(kit.drafter).feature[0]
        for row in range(3):
            paths = {0: (17,)}
            for node, parent in enumerate(topology.parents[1:], 1):
                token = int(draft.tokens[row, node - 1])
                paths[node] = (*paths[parent], token)
            for i, node in enumerate(topology.inner):
                path = paths[int(node)]
                right = jax.nn.softmax(head_by_loops(kit, len(path), f, path))
                np.testing.assert_allclose(draft.probs[row, i], right, atol=2e-5)


def test_a_dynamic_tree_keeps_the_likeliest_paths(kit):
    """All of the beam: every node's tokens are the best two of its parent's law."""
    draft = kit.draft(topology=DynamicTree(num_nodes=11, depth=3, width=2))
    f, paths = kit.state(kit.drafter).feature[0], {0: (17,)}
    for node, parent in enumerate(draft.parents[0, 1:].tolist(), 1):
        path = paths[parent]
        best = np.argsort(-head_by_loops(kit, len(path), f, path))[:2]
        token = int(draft.tokens[0, node - 1])
        assert token in best
        paths[node] = (*path, token)
    assert max(map(len, paths.values())) == 4
    assert len(set(paths.values())) == 11


def test_a_chain_is_a_tree_of_one_path_and_may_be_shorter_than_the_heads(kit):
    whole = kit.draft(Sampling(), seeds=range(4))
    short = kit.draft(Sampling(), seeds=range(4), gamma=1, num_heads=3)
    np.testing.assert_allclose(short.probs[:, 0], whole.probs[:, 0], atol=1e-6)
    assert short.tokens.shape == (4, 1)


def test_a_head_never_learns_the_token_before_its_own(kit):
    """With one label left head k is scored where that token is x_{t+1+k}."""
    _, logs = kit.loss(np.arange(8) == 3)
    g, _ = kit.drafter.context(kit.weights, kit.out.features)
    right = []
    for k, t in ((1, 1), (2, 0)):
        logits = head_by_loops(kit, k, g[0, t], TEXT[t + 1 : t + 1 + k])
        right.append(-jax.nn.log_softmax(logits)[TEXT[3]])
    np.testing.assert_allclose(logs["lm"], [*right, 0], atol=5e-5)


def test_weights_start_as_in_the_reference(kit):
    weights = jax.jit(kit.drafter.init)(jax.random.key(0), kit.shared)
    same = jax.tree.map(lambda a, b: a.shape == b.shape, weights, kit.weights)
    assert all(jax.tree.leaves(same))
    for k in (1, 2, 3):
        p, end = weights[f"head_{k}"], (24 * (k + 1)) ** -0.5
        assert not np.any(p["first"][1]) and not np.any(p["rest"])
        for drawn in (p["first"][0], p["first_bias"]):
            assert 0.8 * end < np.max(np.abs(drawn)) <= end
        for bias in (p["rest_bias"], p["vocab_bias"]):
            assert np.any(bias) and np.all(np.abs(bias) <= 24**-0.5)
        np.testing.assert_array_equal(p["vocab"], kit.shared.head)


def test_dropout_falls_alike_whatever_stands_beside_a_position():
    kit = make_kit("hydra_plus")
    drop = lambda shape: kit.make(dropout=0.5)._dropout(jax.random.key(0), shape)
    few, many = drop((1, 8))(jnp.ones((1, 8, 40)), 1), drop((2, 9))
    x = many(jnp.ones((2, 9, 40)), 1)
    np.testing.assert_array_equal(x[:1, :8], few)
    assert set(np.unique(x)) == {0.0, 2.0} and abs(float(x.mean()) - 1) < 0.15
    assert np.any(x != many(jnp.ones((2, 9, 40)), 2))


def test_dropout_changes_the_loss_and_not_the_expected_acceptance():
    kit, mask = make_kit("hydra_plus"), np.arange(8) >= 3
    a, plain = kit.loss(mask, dropout=0.0)
    b, dropped = kit.loss(mask, dropout=0.5)
    assert float(a) != float(b)
    np.testing.assert_array_equal(plain["alpha"], dropped["alpha"])


def test_the_expected_acceptance_is_the_overlap_with_the_targets_law(kit):
    """Of position 0 alone: the texts are thinned to every eighth."""
    _, logs = kit.loss(np.arange(8) >= 0)
    g, _ = kit.drafter.context(kit.weights, kit.out.features)
    target = jax.nn.softmax(kit.shared.logits(kit.out.hidden[0]))
    for k in (1, 2, 3):
        q = jax.nn.softmax(head_by_loops(kit, k, g[0, 0], TEXT[1 : 1 + k]))
        right = np.minimum(q, target[k]).sum()
        np.testing.assert_allclose(logs["alpha"][k - 1], right, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        Tree.of_paths(PATHS),
        DynamicTree(9, 3, 3),
    ],
)
def test_greedy_text_of_a_tree_is_the_targets_own(kit, topology):
    drafter = dataclasses.replace(kit.drafter, topology=topology)
    model, weights = Model(TARGET, drafter, GREEDY), Weights(kit.params, kit.weights)
    options = {"max_new_tokens": 24}
    ours = generate(model, weights, [TEXT, TEXT[:3]], **options)
    plain = generate(autoregressive(model), weights, [TEXT, TEXT[:3]], **options)
    assert ours.tokens == plain.tokens


def test_the_ends_of_the_settings_fit_each_other():
    plus = HydraPlus.for_target(CONFIG, None)
    assert (plus.num_layers, plus.w_lm, plus.w_teacher) == (4, 0.0, 1.0)
    assert plus.prefix is not None and plus.prefix.num_layers == 1
    assert HydraPlus.for_target(CONFIG, None, prefix=None).prefix is None
    _, weights = testing.tiny_drafter("hydra", *testing.tiny_target(), gamma=2)
    assert set(weights) == {"head_1", "head_2"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0}, "Hydra needs gamma >= 1, got 0"),
        ({"num_layers": 0}, "Hydra needs num_layers >= 1, got 0"),
        ({"gamma": 5}, "gamma=5 .* num_heads=4"),
        ({"topology": Tree.chain(6)}, "depth 6 .* num_heads=4"),
        ({"w_lm": 0.0}, "one above"),
        ({"dropout": 1.0}, "dropout < 1, got 1.0"),
        ({"prefix": CONFIG}, "one layer, got num_layers=7"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Hydra(**fields)
