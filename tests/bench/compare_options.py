# SPDX-License-Identifier: MIT
"""The words for shapes and sizes on the command lines of compare and costs."""

import argparse

from contenders import Shape

SHAPES = [
    Shape("1x8", 1, 8),
    Shape("4x2", 4, 2),
    Shape("3x4", 3, 4),
    Shape("4x8", 4, 8),
    Shape("4x8-roundrobin", 4, 8, round_robin=True),
    Shape("4x2-1gbit", 4, 2, rate="1gbit"),
]


def parse_size(text):
    units = {"K": 10, "M": 20, "G": 30}
    shift = units.get(text[-1:].upper(), 0)
    n = int(text[:-1] if shift else text) << shift
    if n <= 0 or n % 4:
        raise argparse.ArgumentTypeError(f"{text} is no number of bytes of float32 values")
    return n


def shape_of(text):
    for s in SHAPES:
        if s.name == text:
            return s
    name, _, rate = text.partition("-")
    try:
        nodes, ranks = (int(x) for x in name.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"no shape is called {text}; there are {', '.join(s.name for s in SHAPES)}, or NxR, NxR-RATE") from None
    return Shape(text, nodes, ranks, rate=rate or None)
