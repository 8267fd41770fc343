"""Realistic and awkward shapes, for tests and benchmarks alike."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    nodes: int  # N
    heads: int  # H
    kv_heads: int  # K
    slots: int  # S
    width: int  # E
    window: int | None = None


# Rows are empty, full and half full, in this order, and then hold 7 slots.
SMALL = {
    "one node": Shape(3, 1, 4, 2, 128, 64),
    "a chain of 8": Shape(3, 8, 4, 2, 256, 64),
    "33 nodes, two words": Shape(2, 33, 2, 1, 384, 128),
    "64 nodes": Shape(3, 64, 4, 4, 512, 64),
    "a window": Shape(3, 5, 6, 2, 1024, 64, window=100),
    "wide heads": Shape(2, 7, 2, 1, 384, 256),
    "wide heads, a window": Shape(4, 13, 3, 1, 640, 256, window=33),
    "no size a power of 2": Shape(4, 21, 15, 5, 384, 128),
}
LARGE = {
    "smollm2, 2k": Shape(4, 16, 9, 3, 2048, 64),
    "llama-3.1-8b, 8k": Shape(8, 16, 32, 8, 8192, 128),
    "llama-3.1-8b, 32k, 64 nodes": Shape(1, 64, 32, 8, 32768, 128),
    "gemma, local": Shape(8, 16, 8, 4, 8192, 256, window=1024),
}
