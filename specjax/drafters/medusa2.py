"""Medusa-2: the heads of Medusa-1, trained together with the target.

Cai et al. 2024, arXiv:2401.10774, section 2.2.2. Heads, draft and loss are those of
`medusa.py`; `specjax/joint.py` has the combined loss

    loss = L_0 + lambda s(step) sum_k decay^k CE(q_k, x_{t+1+k})

its warm-up, its two learning rates, the self-distillation and what departs from the
reference code (axolotl fork ctlllll/axolotl 76bc572). The rates of that code's configs:
lambda 0.2 where data is given, 0.01 for self-distillation.

The target that verifies is the tuned one: output is that target's, exactly, and differs
from that of the target one began with (`joint.quality`).
"""

import dataclasses
from typing import Any, ClassVar, Literal

from specjax.drafters.base import Card, Joint
from specjax.drafters.medusa import Medusa
from specjax.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Medusa2(Medusa):
    """Hyperparameters; the fields below are those of `base.Joint`."""

    card: ClassVar[Card] = Card(
        reads="last feature",
        passes="1",
        trained="heads, target",
        paper="Cai et al., arXiv:2401.10774",
        year=2024,
    )
    adapts: ClassVar[tuple[str, ...]] = ("medusa",)  # a training may start so

    head_weight: float = 0.2
    schedule: Literal["constant", "linear", "sine"] = "constant"
    heads_first: float = 0.5
    target_rate: float = 0.25
    distil: bool = True
    rank: int = 32
    alpha: float = 16.0

    def __post_init__(self):
        super().__post_init__()
        self.joint  # noqa: B018  (its own checks)

    @classmethod
    def adapt(cls, heads: Medusa, config: TransformerConfig, mask_token_id, **fields):
        """The second stage alone: the heads are trained, the target moves at once."""
        del config, mask_token_id
        values: dict[str, Any] = {"heads_first": 0.0} | vars(heads)
        return cls(**values | fields)

    @property
    def joint(self) -> Joint:
        return Joint(
            self.head_weight,
            self.schedule,
            self.heads_first,
            self.target_rate,
            self.distil,
            self.rank,
            self.alpha,
        )
