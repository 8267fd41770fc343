"""Array types in the project's one alphabet of axis letters.

B sequences, T positions in this pass, S cache slots, G drafted tokens, N tree nodes
(anchor included), V vocabulary, D width, H query heads, K kv heads, E head width,
F MLP width, L layers, M taps. ``*B`` stands for any leading axes.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int, Key

PRNGKey = Key[Array, ""]
Keys = Key[Array, "B"]  # one key per sequence: rows never share randomness
Params = Any  # a plain tree of arrays, as Flax's `init` returns it

__all__ = ["Array", "Bool", "Float", "Int", "Keys", "PRNGKey", "Params"]
