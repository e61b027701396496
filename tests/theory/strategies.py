"""Draws of teachers and states."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from lightning_sv.theory.series import exact
from lightning_sv.theory.students import Student

entries = st.fractions(-3, 3, max_denominator=6)


@st.composite
def rational_teachers(draw: st.DrawFn) -> NDArray:
    """W* in Fractions, c up to 3, d up to 3, not 0."""
    c = draw(st.integers(1, 3))
    d = draw(st.integers(1, 3))
    flat = draw(st.lists(entries, min_size=c * d, max_size=c * d).filter(any))
    return exact(flat).reshape(c, d)


@st.composite
def matchings(draw: st.DrawFn) -> NDArray:
    """At most one entry per row and column; entries that flows can distinguish from 0."""
    c = draw(st.integers(1, 3))
    d = draw(st.integers(1, 3))
    teacher = np.zeros((c, d))
    columns = draw(st.permutations(range(d)))
    for i in range(min(c, d)):
        teacher[i, columns[i]] = draw(
            st.sampled_from([-3.0, -1.5, -0.5, 0.5, 1.0, 2.0] + [0.0] * (i > 0))
        )
    return teacher


@st.composite
def balanced_teachers(draw: st.DrawFn) -> NDArray:
    """Columns of one norm in random directions, d > 1."""
    c = draw(st.integers(1, 3))
    d = draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    teacher = rng.standard_normal((c, d))
    return draw(st.sampled_from([0.5, 1.0, 2.5])) * teacher / np.linalg.norm(teacher, axis=0)


@st.composite
def states(draw: st.DrawFn, student: Student) -> tuple[list[NDArray], NDArray]:
    """Parameters and a teacher, every entry in [-3, 3] and no scale near 0."""
    c = draw(st.integers(1, 3))
    d = draw(st.integers(1, 4))
    signed = st.floats(0.1, 3).flatmap(lambda x: st.sampled_from([x, -x]))
    blocks = [draw(arrays(float, block.shape, elements=signed)) for block in student.initial(c, d)]
    return blocks, draw(arrays(float, (c, d), elements=st.floats(-3, 3)))
