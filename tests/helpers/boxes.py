"""Random shapes and boxes of arrays."""

from hypothesis import strategies as st

from ckpt.state.boxes import Box

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
