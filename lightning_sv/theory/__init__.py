"""The paper's theorems as checkable objects: gradient flows, exact power series, the SDE of SGD.

Imports nothing else of lightning_sv, but for `toy_training`, which trains its models. A reparameterization of one's own
is a subclass of `ScaledInput`, any other student one of `Student`, a teacher a matrix or a `Teacher`; `study` shows
them beside the paper's.
"""

from lightning_sv.theory.claims import CLAIMS
from lightning_sv.theory.flow import flow
from lightning_sv.theory.students import STUDENTS, ScaledInput, Student
from lightning_sv.theory.study import study
from lightning_sv.theory.teachers import TEACHERS, Teacher

__all__ = ["CLAIMS", "STUDENTS", "TEACHERS", "ScaledInput", "Student", "Teacher", "flow", "study"]
