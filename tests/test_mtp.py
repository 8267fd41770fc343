"""MTP against recorded numbers, a row-by-row transcription and worked examples."""

import dataclasses
import functools

import folders
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_conformance as battery

from specjax import testing
from specjax.drafters.base import Batch
from specjax.drafters.mtp import MTP
from specjax.sampling import GREEDY, Sampling
from specjax.targets import convert
from specjax.targets.llama import Llama
from specjax.tree import Tree

TEXT = [3, 17, 2, 5, 20, 11, 9]
KEYS = jax.random.split(jax.random.key(0), 1)


@functools.cache
def models(seed=1, **fields):
    """A tiny target, its states of TEXT, and modules with no weight at zero."""
    target, params = testing.tiny_target()
    fields = {"unroll": None, "decay": 1.0} | fields
    drafter, weights = testing.tiny_drafter("mtp", target, params, **fields)
    weights = testing.perturb(weights, seed, 0.3)
    run = jax.jit(functools.partial(target, taps=(-1,)))
    states = run(params, jnp.array([TEXT])).features
    return drafter, weights, target.shared(params), states


def read(drafter, weights, shared, states, text=TEXT, slots=24):
    ids, lengths = jnp.array([text]), jnp.array([len(text)])
    prefill = jax.jit(drafter.prefill, static_argnums=5)
    return prefill(weights, shared, ids, lengths, states, slots)


def propose(drafter, weights, shared, state, anchor, sampling=GREEDY):
    draft = jax.jit(drafter.draft, static_argnums=4)
    return draft(weights, shared, state, jnp.array([anchor]), sampling, KEYS)[0]


def module(drafter, weights, shared, k, rows, tokens):
    """Module k over given h and tokens, in NumPy: h^k of the rows and their logits."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights[f"module_{k}"])
    c, embed = drafter.config, np.asarray(shared.embed, np.float64)
    v = []
    for h, token in zip(rows, tokens, strict=True):
        e = golden.rms(embed[token], w["embed_norm"]["scale"], c.norm_eps)
        h = golden.rms(h, w["hidden_norm"]["scale"], c.norm_eps)
        v.append(w["proj"] @ np.concatenate([e, h]))
    stack = {"embed": np.array(v), "layer_0": w["layer"], "norm": w["norm"]}
    stack["head"] = np.asarray(shared.head, np.float64)
    states, logits = golden.decode(stack, c, range(len(v)))
    return states[-1], logits


def transcribed(drafter, weights, shared, states, text, anchor, steps):
    """The likeliest draft and its logits, every depth from row 0 on."""
    D, n, drafts, logits = drafter.num_modules, len(text), [], []
    known, h = [*text, anchor], list(np.asarray(states, np.float64))
    for k in range(1, steps + 1):
        tokens = [*known, *drafts]
        if k <= D:
            rows, below = h, tokens[k : k + n]
        else:  # one row more for the last module, on its own last output
            rows, below = [*rows, h[-1]], [*below, drafts[-1]]
        h, z = module(drafter, weights, shared, min(k, D), rows, below)
        logits.append(z[-1])
        drafts.append(int(np.argmax(z[-1])))
    return drafts, np.array(logits)


@pytest.mark.parametrize(
    ("num_modules", "length"),
    [
        (2, 2),
        *[pytest.param(n, 2, marks=pytest.mark.slow) for n in (1, 3)],
        *[pytest.param(n, 7, marks=pytest.mark.slow) for n in (1, 2, 3)],
    ],
)
def test_a_draft_equals_its_transcription(num_modules, length):
    """Chained modules, then the last one again; longer and shorter than the window."""
    fields = {"num_modules": num_modules, "gamma": 5 if length > 2 else num_modules}
    drafter, weights, shared, states = models(**fields)
    text, states = TEXT[:length], states[:, :length]
    state = read(drafter, weights, shared, states, text)
    tokens, logits = transcribed(
        drafter, weights, shared, states[0], text, 8, drafter.gamma
    )
    assert propose(drafter, weights, shared, state, 8).tokens[0].tolist() == tokens
    drawn = propose(drafter, weights, shared, state, 8, Sampling())
    law = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose(drawn.probs[0, 0], law, atol=2e-5)


@pytest.mark.parametrize("num_modules", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
def test_laws_of_a_tree_are_those_of_its_paths(num_modules):
    """Each inner node against a chain's draft of its own path, by teacher forcing."""
    topology = Tree((-1, 0, 0, 1, 2, 2, 4, 6))
    fields = {"num_modules": num_modules, "topology": topology}
    drafter, weights, shared, states = models(**fields)
    state = read(drafter, weights, shared, states)
    draft = propose(drafter, weights, shared, state, 8, Sampling())
    tokens = np.asarray(draft.tokens[0])
    for row, node in zip(draft.probs[0], topology.inner, strict=True):
        path = []
        while node:
            path.insert(0, int(tokens[node - 1]))
            node = topology.parents[node]
        logits = forced(drafter, weights, shared, states[0], path)
        law = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(row, law, atol=3e-5)


def forced(drafter, weights, shared, states, path):
    """Logits after the anchor 8 and the drafted tokens of a path."""
    D, n, tokens = drafter.num_modules, len(TEXT), [*TEXT, 8, *path]
    h = list(np.asarray(states, np.float64))
    for k in range(1, len(path) + 2):
        if k <= D:
            rows, below = h, tokens[k : k + n]
        else:
            rows, below = [*rows, h[-1]], [*below, path[k - 2]]
        h, z = module(drafter, weights, shared, min(k, D), rows, below)
    return z[-1]


MIMO = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "model_type": "qwen2",
    "rope_theta": 1e6,
}
IDS = [3, 17, 42, 5, 60, 11, 29]


@functools.cache
def mimo():
    """A Qwen2 target and a module of its layer, filled in a file of MiMo's names.

    Recorded with `transformers` 5.24. MiMo has the hidden state first in the
    concatenation; its columns are swapped to ours.
    """
    config = convert.config_from_hf(MIMO)
    at, D = "model.mtp_layers.0.", 32
    layer = {n for n in folders.shapes(MIMO) if ".layers.1." in n}
    shapes = folders.shapes(MIMO)
    shapes |= {n.replace("model.layers.1.", at): shapes[n] for n in layer}
    norms = ("token", "hidden", "final")
    shapes |= {f"{at}{n}_layernorm.weight": (D,) for n in norms}
    shapes[f"{at}input_proj.weight"] = (D, 2 * D)
    assert len(shapes) == 43
    tensors = folders.fill(shapes)
    stack = {n: t for n, t in tensors.items() if "mtp" not in n}
    params = convert.params_from_tensors(config, stack, jnp.float32)
    # The module's layer is read as layer 1 of the same target.
    moved = stack | {n: tensors[n.replace("model.layers.1.", at)] for n in layer}
    inner = convert.params_from_tensors(config, moved, jnp.float32)["layer_1"]
    scale = lambda n: {"scale": jnp.asarray(tensors[f"{at}{n}_layernorm.weight"])}
    proj = np.roll(tensors[f"{at}input_proj.weight"], D, axis=1)
    weights = {
        "embed_norm": scale("token"),
        "hidden_norm": scale("hidden"),
        "norm": scale("final"),
        "proj": jnp.asarray(proj),
        "layer": inner,
    }
    target = Llama(config)
    hidden = jax.jit(target)(params, jnp.array([IDS])).hidden
    return target, params, {"module_1": weights}, hidden


def test_logits_are_those_recorded_for_a_module_of_the_qwen2_layer():
    target, params, weights, hidden = mimo()
    logits = target.logits(params, hidden)[0]
    right = [-0.723712, -0.674087, 0.139066, 0.165723, 0.304351, -1.358566]
    np.testing.assert_allclose(logits[-1, :6], right, atol=1e-4)
    assert int(jnp.argmax(logits[-1])) == 21
    drafter, shared = MTP.for_target(target.config, None), target.shared(params)
    # The text's own next tokens, then the anchor 21.
    rows = jnp.pad(hidden, ((0, 0), (0, 1), (0, 0)))  # no row sees the last
    steps = jax.jit(drafter.steps, static_argnums=4)
    g = steps(weights, shared, jnp.array([[*IDS, 21]]), rows, 1)
    ours = np.asarray(shared.logits(g[0])[0, :7])
    right = [-0.343102, -0.624016, 0.190342, -0.027275, 0.662955, 0.620250]
    np.testing.assert_allclose(ours[-1, :6], right, atol=1e-4)
    right = [-1.116081, -0.943462, 0.026280]
    np.testing.assert_allclose(ours[2, :3], right, atol=1e-4)
    np.testing.assert_allclose(
        [ours.sum(), np.abs(ours).sum()], [5.05095, 205.14202], atol=2e-3
    )
    assert ours.argmax(1).tolist() == [5, 13, 24, 29, 24, 22, 39]


def test_three_drafts_by_reuse_are_those_recorded():
    target, params, weights, hidden = mimo()
    drafter, shared = (
        MTP.for_target(target.config, None, gamma=3),
        target.shared(params),
    )
    state = read(drafter, weights, shared, hidden, IDS)
    assert propose(drafter, weights, shared, state, 21).tokens[0].tolist() == [
        39,
        42,
        60,
    ]


def loss(drafter, weights, shared, states, mask):
    batch = Batch(jnp.array([TEXT]), mask[None], states, states)
    return jax.jit(drafter.loss)(weights, shared, batch, jax.random.key(0))


@pytest.mark.parametrize("num_modules", [1, 2])
def test_row_i_of_depth_k_reads_token_i_plus_k_and_learns_the_next(num_modules):
    """x_0 .. x_6: with only x_4 to learn, depth k is scored on row 3 - k alone."""
    drafter, weights, shared, states = models(num_modules=num_modules)
    _, logs = loss(drafter, weights, shared, states, jnp.arange(7) == 4)
    h, right = list(np.asarray(states[0], np.float64)), []
    for k in range(1, num_modules + 1):
        h, z = module(drafter, weights, shared, k, h[: 7 - k], TEXT[k:])
        row = z[3 - k]
        right.append(np.log(np.exp(row).sum()) - row[TEXT[4]])
    np.testing.assert_allclose(logs["ce"], right, atol=5e-5)


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({"num_modules": 2}, (0.5, 0.5)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"num_modules": 2, "weight": 0.3}, (0.15, 0.15)),
                ({"unroll": 3, "decay": 0.6}, (0.510204, 0.306122, 0.183673)),
                ({"num_modules": 2, "unroll": 3, "decay": 0.5}, (4 / 7, 2 / 7, 1 / 7)),
            )
        ),
    ],
)
def test_the_loss_is_the_weighted_mean_over_the_steps(fields, shares):
    value, logs = loss(*models(**fields), jnp.arange(7) >= 2)
    np.testing.assert_allclose(value, np.dot(shares, logs["ce"]), rtol=1e-5)


def test_steps_past_the_last_module_are_trained_on_its_own_output():
    drafter, weights, shared, states = models(unroll=2)
    _, logs = loss(drafter, weights, shared, states, jnp.arange(7) >= 2)
    h, _ = module(drafter, weights, shared, 1, states[0, :6].astype(float), TEXT[1:])
    _, z = module(drafter, weights, shared, 1, h[:5], TEXT[2:])
    cells = [np.log(np.exp(z[i]).sum()) - z[i][TEXT[i + 3]] for i in range(4)]
    np.testing.assert_allclose(logs["ce"][1], np.mean(cells), atol=5e-5)


@pytest.mark.parametrize(
    ("num_modules", "carry"),
    [
        (3, "normed"),
        *[
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((2, "normed"), (2, "raw"), (3, "raw"))
        ],
    ],
)
def test_commit_equals_prefill_for_chained_modules(num_modules, carry):
    """The stale rows of deeper modules, built from drafts, are all made anew."""
    wrap = lambda d: dataclasses.replace(
        d, num_modules=num_modules, carry=carry, gamma=3
    )
    kit = chained(wrap)
    for accepted in ((0, 1, 2), (1, 0, 0), (99, 99, 99)):
        battery.test_commit_equals_prefill_of_the_longer_text(kit, accepted)


def chained(wrap):
    """The battery's kit with parameters for the wrapped drafter."""
    kit = battery.Kit("mtp", wrap)
    weights = jax.jit(kit.drafter.init)(jax.random.key(1), kit.shared)
    kit.weights = testing.perturb(weights)
    return kit


def test_after_many_rounds_the_laws_are_those_of_a_prefill():
    kit = chained(lambda d: dataclasses.replace(d, num_modules=2, gamma=2))
    lengths = np.array([2, 5, 3])
    state, shared = kit.read(lengths)
    text = jnp.asarray(battery.TEXTS)
    rows, node = np.arange(3)[:, None], np.arange(3)[None]
    for accepted in ([2, 0, 1], [0, 2, 2], [1, 1, 0]):
        accepted = np.array(accepted)
        anchor = text[rows[:, 0], lengths]
        _, state = kit.propose((state, shared), anchor)
        at = lengths[:, None] + node
        features = kit.run(text).features[rows, at]
        verdict = battery.Verdict(
            jnp.asarray(accepted, jnp.int32), text[rows, at], jnp.ones(3, bool)
        )
        state = kit.commit(
            kit.weights, kit.shared, state, verdict, text[rows, at], features
        )
        lengths = lengths + accepted + 1
    battery.assert_same(state, kit.read(lengths)[0])


def test_a_round_of_one_token_is_the_first_step_alone():
    drafter, weights, shared, states = models(gamma=1)
    state = read(drafter, weights, shared, states)
    draft = propose(drafter, weights, shared, state, 8, Sampling())
    _, logits = transcribed(drafter, weights, shared, states[0], TEXT, 8, 1)
    law = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose(draft.probs[0, 0], law, atol=2e-5)
    wide = dataclasses.replace(drafter, topology=Tree((-1, 0, 0, 0)))
    state = read(wide, weights, shared, states)
    tokens = propose(wide, weights, shared, state, 8).tokens[0].tolist()
    assert tokens == np.argsort(-logits[0])[:3].tolist()


def test_a_module_made_for_a_target_is_trained_for_the_whole_draft():
    config = testing.tiny_target()[0].config
    assert MTP.for_target(config, None).unroll == 4
    assert MTP.for_target(config, None, gamma=2, num_modules=3).unroll == 3
    assert MTP.for_target(config, None, unroll=1).unroll == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0}, "gamma >= 1, got 0"),
        ({"num_modules": 0}, "num_modules >= 1, got 0"),
        ({"num_modules": 3, "unroll": 2}, "unroll=2 is less than num_modules=3"),
        ({"decay": 1.5}, "decay <= 1, got 1.5"),
        ({"weight": 0.0}, "weight > 0, got 0.0"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        models.__wrapped__(**fields)


def test_a_target_of_another_width_is_refused():
    drafter, _, shared, _ = models()
    config = dataclasses.replace(drafter.config, width=32)
    with pytest.raises(ValueError, match="width 32, the target 16"):
        MTP(config).init(jax.random.key(0), shared)
