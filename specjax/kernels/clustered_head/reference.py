"""What the scores of chosen clusters mean."""

import jax.numpy as jnp


def token_scores(z, best, clusters):
    """See the package."""
    f32 = {"preferred_element_type": jnp.float32}
    return jnp.einsum("BD,BYRD->BYR", z, clusters[best], **f32)
