"""The registry: one line a drafter."""

from typing import Any

from specjax.drafters import (
    blockwise,
    dflash,
    dflash2,
    draft_model,
    dspark,
    eagle,
    eagle3,
    gemma4_mtp,
    hydra,
    medusa,
    medusa2,
    mtp,
    p_eagle,
    pard,
    pard2,
)
from specjax.drafters.base import Drafter

REGISTRY: dict[str, type[Drafter]] = {
    "draft_model": draft_model.DraftModel,
    "blockwise": blockwise.Blockwise,
    "medusa": medusa.Medusa,
    "medusa2": medusa2.Medusa2,
    "hydra": hydra.Hydra,
    "hydra_plus": hydra.HydraPlus,
    "eagle": eagle.Eagle,
    "eagle3": eagle3.Eagle3,
    "mtp": mtp.MTP,
    "gemma4_mtp": gemma4_mtp.Gemma4MTP,
    "dflash": dflash.DFlash,
    "dflash2": dflash2.DFlash2,
    "dspark": dspark.DSpark,
    "p_eagle": p_eagle.PEagle,
    "pard": pard.Pard,
    "pard2": pard2.Pard2,
}


def get(name: str) -> type[Any]:
    """Looks a drafter up by its registry name."""
    if name not in REGISTRY:
        raise KeyError(f"unknown drafter {name!r}; registered: {', '.join(REGISTRY)}.")
    return REGISTRY[name]


__all__ = ["REGISTRY", "Drafter", "get"]
