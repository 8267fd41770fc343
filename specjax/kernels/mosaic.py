"""What the Mosaic GPU kernels share."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# How a tile lies in shared memory for the products of the tensor cores.
SWIZZLED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def on_hopper() -> bool:
    """Whether this process computes on a chip that the kernels are compiled for."""
    return jax.default_backend() == "gpu" and capability().startswith("9.")


def capability() -> str:
    return getattr(jax.devices()[0], "compute_capability", "unknown")


def check(what: str, refused: str | None, interpret: bool) -> None:
    """Raises where a kernel that was named does not take these arrays or this chip.

    Of a process without a GPU nothing is known: it may lower for one.
    """
    if refused:
        raise ValueError(
            f"the GPU kernel of the {what} takes {refused}. Use "
            "implementation='reference'."
        )
    if jax.default_backend() == "gpu" and not (interpret or on_hopper()):
        raise ValueError(
            f"the GPU kernel of the {what} is for chips of compute capability 9 (H100, "
            f"H200), this one has {capability()}. Use implementation='reference'."
        )


def interpreter():
    """What makes a kernel run as plain operations."""
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        raise NotImplementedError(
            f"jax {jax.__version__} does not interpret Mosaic GPU kernels; jax 0.11 "
            "(Python 3.12) and later do."
        )
    return params()
