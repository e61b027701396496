"""The paper's theorems as checkable objects: gradient flows, exact power series, the SDE of SGD.

Imports nothing else of lightning_sv, except `toy_training`, which trains its models. Define a custom reparameterization
as a subclass of `ScaledInput`, and any other student as one of `Student`. A teacher is a matrix.
"""

from lightning_sv.theory.claims import CLAIMS
from lightning_sv.theory.flow import difference_series, flow, loss_ratio
from lightning_sv.theory.students import STUDENTS, ScaledInput, Student
from lightning_sv.theory.teachers import TEACHERS, Teacher

__all__ = [
    "CLAIMS",
    "STUDENTS",
    "TEACHERS",
    "ScaledInput",
    "Student",
    "Teacher",
    "difference_series",
    "flow",
    "loss_ratio",
]
