"""Random shapes and boxes of arrays."""

import random

from hypothesis import strategies as st

from ckpt.state.boxes import Box, whole_box

shapes = st.lists(st.integers(1, 12), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    """Draw a box of an array of this shape that is not empty."""
    offset, extent = [], []
    for length in shape:
        a = draw(st.integers(0, length - 1))
        offset.append(a)
        extent.append(draw(st.integers(1, length - a)))
    return Box(tuple(offset), tuple(extent))


def cut(shape: tuple[int, ...], cuts: int, rng: random.Random) -> list[Box]:
    """Return boxes that partition an array irregularly: `cuts` times, one box is cut in two."""
    boxes = [whole_box(shape)]
    for _ in range(cuts):
        i = rng.randrange(len(boxes))
        old = boxes[i]
        axes = [k for k, n in enumerate(old.shape) if n > 1]
        if axes:
            k = rng.choice(axes)
            at = rng.randrange(1, old.shape[k])
            first = old.shape[:k] + (at,) + old.shape[k + 1 :]
            rest = old.shape[:k] + (old.shape[k] - at,) + old.shape[k + 1 :]
            boxes[i] = Box(old.offset, first)
            boxes.append(Box(old.offset[:k] + (old.offset[k] + at,) + old.offset[k + 1 :], rest))
    return boxes
