"""Students on a teacher of your own: their flows, their first differences to f, their implicit preconditioners."""

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
    """One student on the teacher.

    Args:
        name: what figures call the student
        loss: along TIMES, shape (T,)
        cubic: coefficient of t³ in L − L_f; None where the student has no rational series at t = 0
        spectrum: eigenvalues of its implicit preconditioner J Jᵀ at each time, ascending, shape (T, c·d)
    """

    name: str
    loss: Array
    cubic: Fraction | None
    spectrum: Array

    @property
    def losses(self) -> dict[float, float]:
        """Loss at the times that a table shows."""
        return {t: float(self.loss[np.searchsorted(TIMES, t)]) for t in SHOWN}


@dataclass(frozen=True)
class Study:
    """All students on one teacher."""

    teacher: Array
    students: tuple[Studied, ...]

    def panels(self) -> tuple[Panel, ...]:
        """Losses, ratios to f, and the slowest direction of the preconditioner."""
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
        """For JSON; the exact coefficient of t³ as a string."""
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
    """Flow of every student of `STUDENTS` and of your own on one teacher.

    Args:
        teacher: W*, shape (c, d); ints, Fractions or floats
        own: further students, each an instance of a subclass of `Student` (or of `ScaledInput`)
    """
    matrix = exact(teacher)
    studied = []
    for student in (*STUDENTS.values(), *own):
        run = flow(student, matrix, TIMES)
        try:
            cubic = difference_series(student, _BASELINE, matrix, 3)[3]
        except (ValueError, TypeError, AttributeError):  # its A is not rational at t = 0, or uses other functions
            cubic = None
        spectrum = np.stack([np.linalg.eigvalsh(student.preconditioner(state)) for state in run.states])
        studied.append(Studied(student.name, run.loss, cubic, spectrum))
    return Study(matrix, tuple(studied))


def parse_teacher(text: str) -> Array:
    """Read "1 2; 3 -1/2" as a matrix of Fractions.

    Raises:
        ConfigError: an entry is no number, the rows differ in length, or every entry is 0
    """
    try:
        rows = [[Fraction(word) for word in row.replace(",", " ").split()] for row in text.split(";")]
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f'--teacher {text!r} is no matrix; write rows of numbers as "1 2; 3 -1/2".') from None
    if any(abs(x) > 10**6 for row in rows for x in row):
        raise ConfigError(f"--teacher {text!r} has an entry beyond a million; scale it down.")
    if len({len(row) for row in rows}) != 1 or not any(x for row in rows for x in row):
        raise ConfigError(f"--teacher {text!r} needs rows of equal length and one entry that is not 0.")
    return exact(rows)


def load_student(path: str) -> Student:
    """Import "module:Class" and make one.

    Raises:
        ConfigError: there is no such class, or it is no Student
    """
    module, _, name = path.partition(":")
    if "" not in sys.path:  # a console script does not look in the working folder
        sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"--student {path!r} cannot be made ({error}); name a class as module:Class.") from None
    if not isinstance(made, Student):
        raise ConfigError(f"--student {path!r} is no Student; subclass lightning_sv.theory.Student or ScaledInput.")
    if not getattr(made, "name", ""):
        raise ConfigError(f"--student {path!r} has no name; give the class a `name`, which figures show.")
    return made
