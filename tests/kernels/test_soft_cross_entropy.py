"""The fused loss of the trainer against autograd in float64."""

import pytest
import torch

from eaglecli.kernels.soft_cross_entropy import soft_cross_entropy_reference, soft_cross_entropy_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(launch, steps, rows, classes, dtype, tolerance):
    generator = torch.Generator().manual_seed(classes)
    logits = (4 * torch.randn(steps, rows, classes, generator=generator)).to(dtype).to(DEVICE)
    label = torch.randn(rows, classes, generator=generator).mul(3).softmax(-1).to(DEVICE)
    weight = torch.rand(steps, rows, generator=generator).to(DEVICE)
    weight[0, 0] = 0.0
    exact = logits.double().requires_grad_()
    wanted = -weight.double() * (label.double() * exact.log_softmax(-1)).sum(-1)
    (gradient,) = torch.autograd.grad(wanted.sum(), exact)
    first = logits.argmax(-1)
    loss, choice = launch(logits, label, weight)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=tolerance, atol=tolerance * 1e-2)
    assert torch.equal(exact.gather(-1, choice[..., None]), exact.gather(-1, first[..., None]))
    assert not logits[0, 0].any(), "a row without weight has a gradient"


@pytest.mark.parametrize("launch", [soft_cross_entropy_triton, soft_cross_entropy_reference])
@pytest.mark.parametrize(("steps", "rows", "classes"), [(1, 2, 5), (3, 4, 96), (2, 3, 4096), (2, 2, 4099)])
def test_loss_choice_and_gradient_are_those_of_autograd(launch, steps, rows, classes):
    check(launch, steps, rows, classes, torch.float32, 1e-4)


def test_the_first_of_equal_logits_is_chosen_across_blocks():
    logits = torch.zeros(1, 1, 9000, device=DEVICE)
    logits[..., [17, 5000, 8999]] = 2.0
    label, weight = torch.full((1, 9000), 1 / 9000, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    assert int(soft_cross_entropy_triton(logits, label, weight)[1]) == 17


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [11776, 49152])
def test_sixteen_bits_agree_up_to_their_rounding(classes):
    check(soft_cross_entropy_triton, 7, 33, classes, torch.bfloat16, 1e-2)


def test_a_broken_contract_is_a_value_error():
    with pytest.raises(ValueError, match="label"):
        soft_cross_entropy_triton(torch.zeros(1, 2, 8), torch.zeros(2, 7), torch.zeros(1, 2))
