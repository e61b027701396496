"""Students on a custom teacher: flows, first differences to f, and implicit preconditioners."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from lightning_sv.errors import ConfigError
from lightning_sv.theory.compare import FLOOR, difference_series
from lightning_sv.theory.dual import Array
from lightning_sv.theory.flow import flow
from lightning_sv.theory.panels import TIME, Line, Panel, ratio_panel
from lightning_sv.theory.students import STUDENTS, Student, exact

_BASELINE = STUDENTS["f"]
SHOWN = (0.1, 0.5, 1.0, 2.0, 4.0)
TIMES = np.unique(np.concatenate([np.geomspace(0.01, 0.5, 40), np.linspace(0.52, 8, 188), SHOWN]))


@dataclass(frozen=True)
class Studied:
    """Results of one student on the teacher.

    Args:
        name: name in figures
        loss: loss at TIMES, shape (T,)
        cubic: coefficient of t³ in L − L_f; None if the student has no rational series at t = 0
        spectrum: eigenvalues of its implicit preconditioner J Jᵀ at each time, ascending, shape (T, c·d)
    """

    name: str
    loss: Array
    cubic: Fraction | None
    spectrum: Array

    @property
    def losses(self) -> dict[float, float]:
        """Loss at the times of the table."""
        return {t: float(self.loss[np.searchsorted(TIMES, t)]) for t in SHOWN}


@dataclass(frozen=True)
class Study:
    """All students on one teacher."""

    teacher: Array
    students: tuple[Studied, ...]

    def panels(self) -> tuple[Panel, ...]:
        """Return panels of losses, ratios to f, and the preconditioner's slowest direction."""
        standard = next(student.loss for student in self.students if student.name == _BASELINE.name)
        alive = standard > FLOOR * standard[0]
        at = TIMES[alive]
        clear = FLOOR * standard[0]
        losses = [Line(s.name, TIMES[s.loss > clear], s.loss[s.loss > clear]) for s in self.students]
        ratios = [Line(s.name, at, s.loss[alive] / standard[alive]) for s in self.students]
        slowest = [Line(s.name, TIMES, s.spectrum[:, 0]) for s in self.students]
        return (
            Panel("Loss along the gradient flow", TIME, "L(t)", losses, scale="y"),
            ratio_panel("Relative to f", "", "f", ratios, (1e-3, 1e3)),
            Panel(
                "Slowest direction of each student", TIME, "least eigenvalue of J Jᵀ, per unit of t", slowest, level=1.0
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON, with the exact coefficient of t³ as a string."""
        rows = [
            {
                "student": s.name,
                "loss": s.losses,
                "cubic": None if s.cubic is None else str(s.cubic),
                "preconditioner_eigenvalues_at_start": s.spectrum[0].tolist(),
                "preconditioner_eigenvalues_at_end": s.spectrum[-1].tolist(),
            }
            for s in self.students
        ]
        return {"teacher": [[str(x) for x in row] for row in self.teacher], "students": rows}


def study(teacher: Any, own: Sequence[Student] = ()) -> Study:
    """Compute the flows of all `STUDENTS` and of your own on one teacher.

    Args:
        teacher: W*, shape (c, d); ints, Fractions or floats
        own: further students, instances of subclasses of `Student` (or of `ScaledInput`)
    """
    matrix = exact(teacher)
    studied = []
    for student in (*STUDENTS.values(), *own):
        run = flow(student, matrix, TIMES)
        try:
            cubic = difference_series(student, _BASELINE, matrix, 3)[3]
        except (ValueError, TypeError, AttributeError):  # A is not rational at t = 0, or uses unsupported functions
            cubic = None
        spectrum = np.stack([np.linalg.eigvalsh(student.preconditioner(state)) for state in run.states])
        studied.append(Studied(student.name, run.loss, cubic, spectrum))
    return Study(matrix, tuple(studied))


def parse_teacher(text: str) -> Array:
    """Parse "1 2; 3 -1/2" as a matrix of Fractions.

    Raises:
        ConfigError: an entry is not a number, the rows differ in length, or every entry is 0
    """
    try:
        rows = [[Fraction(entry) for entry in row.replace(",", " ").split()] for row in text.split(";")]
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f'--teacher {text!r} is not a matrix; expected rows of numbers, for instance "1 2; 3 -1/2".'
        ) from None
    if any(abs(x) > 10**6 for row in rows for x in row):
        raise ConfigError(f"--teacher {text!r} has an entry above a million; expected smaller entries.")
    if len({len(row) for row in rows}) != 1 or not any(x for row in rows for x in row):
        raise ConfigError(
            f"--teacher {text!r} has unequal rows or only zeros; expected rows of equal length and a nonzero entry."
        )
    return exact(rows)


def load_student(path: str) -> Student:
    """Import "module:Class" and create an instance.

    Raises:
        ConfigError: the class does not exist, or is not a Student
    """
    module, _, name = path.partition(":")
    if "" not in sys.path:  # console scripts do not import from the current directory
        sys.path.insert(0, "")
    try:
        student = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"--student {path!r} cannot be created ({error}); expected a class as module:Class."
        ) from None
    if not isinstance(student, Student):
        raise ConfigError(
            f"--student {path!r} is not a Student; expected a subclass of lightning_sv.theory.Student or ScaledInput."
        )
    if not getattr(student, "name", ""):
        raise ConfigError(f"--student {path!r} has no name; expected an attribute `name`, which figures show.")
    return student
