"""Students of the theorems: linear maps of a normalized input, as functions of their parameters.

Setting (paper, Section 2.1): x ~ N(0, I_d), so z = Norm(x) has E[z zᵀ] = I_d, and the squared loss of a
student x -> A z against the teacher W* z is L = ½‖A − W*‖_F². A student is its map parameters -> A.

Shapes: c outputs, d inputs; A, W* (c, d); n parameters in all.
"""

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any

import numpy as np

from lightning_sv.theory.dual import Array, variables


class Student(ABC):
    """A = effective(*blocks), with the student's parameters as blocks.

    A subclass defines the initial parameters and A, using `+ - * /`, integer powers,
    `np.sqrt`, `np.exp`, `sum`, `mean` and indexing. Its gradient, flow, exact power series and
    implicit preconditioner follow by differentiation of `effective`.
    """

    name: str  #: symbol in legends

    @abstractmethod
    def initial(self, c: int, d: int) -> list[Array]:
        """Return the parameters at t = 0 as arrays of integers, W = 0 and every scale vector 1."""

    @abstractmethod
    def effective(self, *blocks: Any) -> Any:
        """Return A, shape (c, d)."""

    def gradient(self, blocks: list[Array], teacher: Array) -> tuple[Any, Array]:
        """Return the loss ½‖A − W*‖_F² and its gradient with respect to all parameters, shape (n,)."""
        a = self.effective(*variables(blocks))
        residual = a.value - teacher
        gradient = residual.ravel() @ a.tangent.reshape(residual.size, -1)
        return (residual * residual).sum() / 2, gradient

    def preconditioner(self, blocks: list[Array]) -> Array:
        """Return K = J Jᵀ with J = ∂vec(A)/∂parameters, so that vec(Ȧ) = −K vec(A − W*).

        Shape (c·d, c·d), A flattened by rows.
        """
        a = self.effective(*variables(blocks))
        jacobian = a.tangent.reshape(a.value.size, -1)
        return np.asarray(jacobian @ jacobian.T)

    def rate(self, blocks: list[Array], teacher: Array) -> float:
        """Return dL/dt of the gradient flow at these parameters: −‖∇L‖²."""
        _, gradient = self.gradient(blocks, teacher)
        return float(-gradient @ gradient)


class Placed(Student):
    """A = diag(γa) W diag(γb): a scale vector after the matrix, before it, on both sides or neither (Section 3.2).

    Args:
        name: symbol in legends
        after: if True, γa is a parameter, else 1
        before: if True, γb is a parameter, else 1
    """

    def __init__(self, name: str, *, after: bool = False, before: bool = False):
        self.name, self.after, self.before = name, after, before

    def initial(self, c: int, d: int) -> list[Array]:
        """Return W = 0, and γa = 1 and γb = 1 if they are parameters."""
        scales = [np.ones(n) for n, learnt in ((c, self.after), (d, self.before)) if learnt]
        return [np.zeros((c, d)), *scales]

    def effective(self, *blocks: Any) -> Any:
        """Return diag(γa) W diag(γb)."""
        a = blocks[0]
        if self.after:
            a = blocks[1][:, None] * a
        return a * blocks[-1] if self.before else a


class ScaledInput(Student):
    """A = W diag(γ): a scale vector in front of the matrix, in any parameterization of γ.

    For a reparameterization, subclass it with `initial_scale` and `gamma`.
    """

    @abstractmethod
    def initial_scale(self, d: int) -> list[Array]:
        """Return the parameters of γ at t = 0, with γ = 1."""

    @abstractmethod
    def gamma(self, *scale: Any) -> Any:
        """Return γ, shape (d,)."""

    def initial(self, c: int, d: int) -> list[Array]:
        """Return W = 0 and the parameters of γ = 1."""
        return [np.zeros((c, d)), *self.initial_scale(d)]

    def effective(self, *blocks: Any) -> Any:
        """Return W diag(γ)."""
        return blocks[0] * self.gamma(*blocks[1:])

    def gamma_preconditioner(self, *scale: Array) -> Array:
        """Return P = J Jᵀ with J = ∂γ/∂parameters, so that γ̇ = −P ∇_γ L. Shape (d, d)."""
        jacobian = self.gamma(*variables(list(scale))).tangent
        return np.asarray(jacobian @ jacobian.T)


class OriginalSpace(ScaledInput):
    """OR, ψ: γ = β·Norm(α), Norm(α) = α / rms(α) (paper, Section 3.3)."""

    name = "ψ"

    def initial_scale(self, d: int) -> list[Array]:
        """Return α = 1, β = 1."""
        return [np.ones(d), np.ones(1)]

    def gamma(self, *scale: Any) -> Any:
        """Return β·α / rms(α)."""
        alpha, beta = scale
        return alpha * (beta / np.sqrt((alpha * alpha).mean()))


class Exponential(ScaledInput):
    """ER: γ = exp(β)·exp(α − mean α) (paper, Section 3.3)."""

    name = "ER"

    def initial_scale(self, d: int) -> list[Array]:
        """Return α = 0, β = 0."""
        return [np.zeros(d), np.zeros(1)]

    def gamma(self, *scale: Any) -> Any:
        """Return exp(β + α − mean α)."""
        alpha, beta = scale
        return np.exp(alpha + (beta - alpha.mean()))


class Heterogeneous(Student):
    """HG: A_k = W_k diag(γ_k), a scale vector for each of two branches of one input (paper, Section 3.1).

    A branch has half of the rows of A. With γ_1 = γ_2 it equals f.
    """

    name = "HG"

    @staticmethod
    def branch_of(c: int) -> Array:
        """Return the branch of each of c rows, shape (c,)."""
        return np.arange(c) * min(2, c) // c

    def initial(self, c: int, d: int) -> list[Array]:
        """Return W = 0 and every γ_k = 1."""
        return [np.zeros((c, d)), np.ones((min(2, c), d))]

    def effective(self, *blocks: Any) -> Any:
        """Return the rows of W times the γ of their branch."""
        w, gammas = blocks
        return w * gammas[self.branch_of(w.shape[0])]


#: name -> student
STUDENTS: dict[str, Student] = {
    "g": Placed("g"),
    "f": Placed("f", before=True),
    "hg": Heterogeneous(),
    "ap": Placed("AP", after=True),
    "dp": Placed("φ", after=True, before=True),
    "or": OriginalSpace(),
    "er": Exponential(),
}


def exact(values: Any) -> Array:
    """Return an array of Fractions: integers, Fractions, or floats at their exact value."""
    given = np.asarray(values)
    fractions = [Fraction(x.item() if isinstance(x, np.generic) else x) for x in given.flat]
    return np.array(fractions, dtype=object).reshape(given.shape)
