"""What the scores of chosen clusters mean."""

import jax
import jax.numpy as jnp

from specjax.typing import Array


def token_scores(z, best, clusters) -> Array:
    """See the package."""
    return jax.lax.platform_dependent(
        z, best, clusters, cpu=one_by_one, default=gathered
    )


def gathered(z, best, clusters) -> Array:
    f32 = {"preferred_element_type": jnp.float32}
    return jnp.einsum("BD,BYRD->BYR", z, clusters[best], **f32)


def one_by_one(z, best, clusters) -> Array:
    """The same, a cluster at a time where it lies.

    XLA's CPU compiler copies gathered rows number by number: at Gemma 4's shape, for
    one state on 2 cores, 1.7 ms against 0.15 ms.
    """

    def of_cluster(at):
        row, cluster = at
        rows = jax.lax.dynamic_index_in_dim(clusters, cluster, keepdims=False)
        return jnp.dot(rows, z[row], preferred_element_type=jnp.float32)

    states = jnp.repeat(jnp.arange(z.shape[0]), best.shape[1])
    found = jax.lax.map(of_cluster, (states, best.ravel()))
    return found.reshape(*best.shape, clusters.shape[1])
