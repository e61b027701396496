"""The RMS of a product without the product."""

import torch
from torch import Tensor

from lightning_sv.scale.gram import inverse_rms_of_product


def test_inverse_rms_of_many_equal_rows_is_finite_in_float16() -> None:
    """The sums over 2,048 outputs exceed the largest number of float16."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.05 * torch.randn(2048, 64, generator=generator) + 2 * torch.randn(64, generator=generator)
    x = torch.nn.functional.rms_norm(torch.randn(32, 64, generator=generator) + weight[0], (64,))

    def run(dtype: torch.dtype, loss_scale: float) -> list[Tensor]:
        inputs = [each.to(dtype, copy=True).requires_grad_() for each in (x, weight)]
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            r = inverse_rms_of_product(inputs[0], inputs[1], None, 1e-5)
        gradients = torch.autograd.grad(r.sum() * loss_scale, inputs)
        return [r.double(), *(gradient.double() / loss_scale for gradient in gradients)]

    for found, expected in zip(run(torch.float32, 2.0**16), run(torch.float64, 1.0), strict=True):
        assert (found - expected).norm() < 2e-3 * expected.norm()
