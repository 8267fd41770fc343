"""Realistic and awkward shapes, for tests and benchmarks alike."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int  # states
    clusters: int  # C
    rows: int  # R, tokens of a cluster
    width: int  # D
    scored: int  # Y


SMALL = {
    "one of one": Shape(1, 1, 8, 16, 1),
    "all": Shape(2, 4, 16, 32, 4),
    "odd": Shape(3, 11, 13, 24, 5),
    "two steps": Shape(2, 32, 128, 128, 9),
    "three clusters a state": Shape(5, 16, 128, 256, 3),
    "a width of no tile": Shape(1, 24, 40, 200, 17),
}
LARGE = {
    "gemma 4 e2b": Shape(1, 2048, 128, 256, 32),
    "gemma 4 e2b, 16 states": Shape(16, 2048, 128, 256, 32),
    "llama 3": Shape(8, 1002, 128, 4096, 32),
}
