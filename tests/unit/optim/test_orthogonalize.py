from __future__ import annotations

import oracle_optim
import pytest
import torch
from torch import Tensor

from gptlab.optim.orthogonalize import NEWTON_SCHULZ, POLAR_EXPRESS, orthogonalize

SHAPES = [(3, 12, 12), (2, 8, 24), (2, 24, 8), (5, 7), (2, 2, 6, 4)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(singular_values: Tensor, cols: int) -> Tensor:
    u, _, vh = torch.linalg.svd(gaussian(len(singular_values), cols).double(), full_matrices=False)
    return u @ torch.diag(singular_values.double()) @ vh


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_is_the_polar_factor(shape: tuple[int, ...]) -> None:
    stack = gaussian(*shape).double()
    result = orthogonalize(stack, "svd", dtype=torch.bfloat16)
    expected = [oracle_optim.polar_factor(m) for m in stack.reshape(-1, *shape[-2:])]
    torch.testing.assert_close(result, torch.stack(expected).reshape(shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterations", [1, 3, 5])
@pytest.mark.parametrize("backend", ["polar_express", "newton_schulz"])
def test_iteration_is_its_polynomial_on_the_singular_values(
    backend: str, iterations: int, shape: tuple[int, ...]
) -> None:
    stack = gaussian(*shape).double()
    coefficients = list(POLAR_EXPRESS) if backend == "polar_express" else [NEWTON_SCHULZ] * 5
    factor, addend = (1.02, 1e-6) if backend == "polar_express" else (1.0, 5e-9)
    expected = [
        oracle_optim.quintic_on_singular_values(m, coefficients[:iterations], float(m.norm()) * factor + addend)
        for m in stack.reshape(-1, *shape[-2:])
    ]
    result = orthogonalize(stack, backend, iterations, dtype=torch.float64)
    # float64: only rounding, which the slope of up to 8.2 a step magnifies.
    torch.testing.assert_close(result, torch.stack(expected).reshape(shape), rtol=1e-8, atol=1e-10)


def test_one_newton_schulz_step_by_hand() -> None:
    # diag(3, 4) has norm 5: 0.6 and 0.8 go to a x + b x^3 + c x^5 = 3.4445 x - 4.775 x^3 + 2.0315 x^5.
    result = orthogonalize(torch.diag(torch.tensor([3.0, 4.0])), "newton_schulz", 1, dtype=torch.float32)
    torch.testing.assert_close(result, torch.diag(torch.tensor([1.19326944, 0.97648192])), rtol=1e-5, atol=1e-7)


def test_polar_express_by_hand() -> None:
    """The first step takes 0.6 and 0.8 over 1.02 to 8.156555 x - 22.483293 x^3 + 15.878770 x^5; of a column all five
    steps take 5 / (5 * 1.02 + 1e-6) to 1.192001, 1.265071, 0.949755, 1.450807, 0.903568."""
    once = orthogonalize(torch.diag(torch.tensor([3.0, 4.0])), "polar_express", 1, dtype=torch.float32)
    torch.testing.assert_close(once, torch.diag(torch.tensor([1.340023, 0.262463])), rtol=1e-5, atol=1e-6)
    column = orthogonalize(torch.tensor([[3.0], [0.0], [4.0]]).double(), "polar_express", 5, dtype=torch.float64)
    torch.testing.assert_close(column, 0.903568 * torch.tensor([[0.6], [0.0], [0.8]]).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 64, 256), (2, 256, 64)])
def test_polar_express_against_the_exact_factor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stack = gaussian(*shape)
    exact = orthogonalize(stack, "svd", dtype=dtype)
    result = orthogonalize(stack, "polar_express", 5, dtype=dtype)
    assert result.dtype is stack.dtype
    # The last polynomials leave the singular values anywhere in [0.8588, 1.1412], so the result may be 14.2% off the
    # exact factor however precise the arithmetic; 1% more for bfloat16's 8 bits. The square Gaussian has a few singular
    # values under 1/300 of its norm, which come out smaller still: its error is measured over the whole matrix.
    bound = 0.142 + (0.01 if dtype is torch.bfloat16 else 0.0)
    assert (result - exact).norm() <= bound * exact.norm()
    # And the direction is that of the exact factor: cos > sqrt(1 - 0.142^2) = 0.989.
    assert torch.nn.functional.cosine_similarity(result.flatten(), exact.flatten(), dim=0) > 0.989


@pytest.mark.parametrize(("backend", "low", "high"), [("polar_express", 0.858, 1.142), ("newton_schulz", 0.681, 1.203)])
def test_where_five_steps_leave_the_singular_values(backend: str, low: float, high: float) -> None:
    spectrum = torch.logspace(0.0, -2.0, 48)  # the smallest is 1/240 of the norm
    stack = with_spectrum(spectrum, 96).float().unsqueeze(0)
    exact = torch.linalg.svdvals(orthogonalize(stack, backend, 5, dtype=torch.float32))
    assert float(exact.min()) > low
    assert float(exact.max()) < high
    # bfloat16 rounds every product's entries by up to 2^-9; 0.003 were measured beyond the exact range.
    rounded = torch.linalg.svdvals(orthogonalize(stack, backend, 5, dtype=torch.bfloat16))
    assert float(rounded.min()) > low - 0.02
    assert float(rounded.max()) < high + 0.02


def test_polar_express_coefficients() -> None:
    assert oracle_optim.PUBLISHED_POLAR_EXPRESS == POLAR_EXPRESS
    # The error of a best approximation swings equally far to both sides of 1.
    values = torch.linspace(1 / 300, 1.0, 200_001, dtype=torch.float64) / 1.02
    for a, b, c in POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    # 1e-8: the grid may miss the peak of the swing by half a step.
    assert float(1.0 - values.min()) == pytest.approx(float(values.max() - 1.0), abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["polar_express", "newton_schulz", "svd"])
def test_hard_spectra_stay_bounded(backend: str, dtype: torch.dtype) -> None:
    """Where an iteration on the Gram matrix blows up in bfloat16 (singular values of 10^7)."""
    falling = with_spectrum(1.0 / torch.arange(1, 129), 512)
    low_rank = with_spectrum(torch.cat([torch.ones(8), torch.full((120,), 1e-4)]), 512)
    stack = torch.stack([falling, low_rank, 1e-8 * falling, 1e8 * low_rank]).float()
    values = torch.linalg.svdvals(orthogonalize(stack, backend, 5, dtype=dtype))
    assert torch.isfinite(values).all()
    assert float(values.max()) < 1.26


@pytest.mark.parametrize("backend", ["polar_express", "newton_schulz", "svd"])
def test_zero_stays_zero_and_neighbours_do_not_mix(backend: str) -> None:
    stack = gaussian(3, 6, 10)
    stack[1] = 0.0
    result = orthogonalize(stack, backend, 5, dtype=torch.float32)
    assert torch.equal(result[1], torch.zeros(6, 10))
    alone = orthogonalize(stack[2], backend, 5, dtype=torch.float32)
    torch.testing.assert_close(result[2], alone, rtol=1e-4, atol=1e-5)


def test_svd_of_a_singular_matrix_adds_no_directions() -> None:
    stack = torch.outer(torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, 2.0]))
    expected = torch.tensor([[0.0, 0.6], [0.0, 0.0], [0.0, 0.8]])
    torch.testing.assert_close(orthogonalize(stack, "svd", dtype=torch.float32), expected)


@pytest.mark.parametrize("backend", ["polar_express", "newton_schulz", "svd"])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)])
def test_scale_and_transpose_do_not_matter(backend: str, shape: tuple[int, int]) -> None:
    stack = gaussian(*shape).double()
    result = orthogonalize(stack, backend, 5, dtype=torch.float64)
    # The addend of 1e-6 on a norm of 0.3 is 3e-6 of it, times a slope of at most 32 on the way to the result.
    torch.testing.assert_close(orthogonalize(0.05 * stack, backend, 5, dtype=torch.float64), result, rtol=0, atol=1e-4)
    torch.testing.assert_close(orthogonalize(stack.mT, backend, 5, dtype=torch.float64).mT, result)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="1 to 5 steps, not 6"):
        orthogonalize(torch.eye(3), "polar_express", 6, dtype=torch.float32)
    with pytest.raises(ValueError, match="unknown orthogonalizer 'qr'"):
        orthogonalize(torch.eye(3), "qr", 5, dtype=torch.float32)  # type: ignore[arg-type]
