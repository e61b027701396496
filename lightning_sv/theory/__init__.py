"""The paper's theorems as checkable objects: gradient flows, exact power series, the SDE of SGD.

Imports only errors and the version of lightning_sv, except `toy_training`, which trains its models.
Define a custom reparameterization as an instance of `Scaled`, and any other student as a subclass
of `Student`. A teacher is a matrix.
"""

from lightning_sv.theory.claims import CLAIMS
from lightning_sv.theory.flow import difference_series, flow, loss_ratio, starts_below
from lightning_sv.theory.students import STUDENTS, TEACHERS, Scaled, Student, Teacher

__all__ = [
    "CLAIMS",
    "STUDENTS",
    "TEACHERS",
    "Scaled",
    "Student",
    "Teacher",
    "difference_series",
    "flow",
    "loss_ratio",
    "starts_below",
]
