"""The paper's theorems as checkable objects: gradient flows, exact power series, the SDE of SGD.

Imports nothing else of lightning_sv, but for `short_runs`, which trains its models. A reparameterization of one's own
is a subclass of `ScaledInput`, any other student one of `Student`, a teacher a matrix or a `Teacher`; `study` shows
them beside the paper's.
"""

from lightning_sv.theory.claims import CLAIMS, Claim, Finding, Result
from lightning_sv.theory.flow import Flow, flow, loss_series, power_series
from lightning_sv.theory.students import STUDENTS, ScaledInput, Student
from lightning_sv.theory.study import Study, study
from lightning_sv.theory.teachers import TEACHERS, Teacher

__all__ = [
    "CLAIMS",
    "STUDENTS",
    "TEACHERS",
    "Claim",
    "Finding",
    "Flow",
    "Result",
    "ScaledInput",
    "Student",
    "Study",
    "Teacher",
    "flow",
    "loss_series",
    "power_series",
    "study",
]
