# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Cross entropy against whole distributions, and its gradient in the place of the logits.

For row (k, m) of K x M rows over V classes, with one label distribution p[m] for all k:

    loss = weight * -sum(p * log softmax(x))        x := weight * (softmax(x) - p)        choice = argmax x, the lowest of equals

A row of logits is read twice, the second time from the cache, and written once; no float32 copy of it exists.
Source of the idea: Hsu et al., "Liger Kernel" (gradients made along with the loss).
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require

_BLOCK = 4096


@triton.jit
def _soft_cross_entropy_kernel(logits_ptr, label_ptr, weight_ptr, loss_ptr, choice_ptr, num_rows, num_classes, BLOCK: tl.constexpr):
    step, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)  # steps run first: they share a label in the cache
    place = step * num_rows + row
    logits_ptr += place * num_classes
    label_ptr += row * num_classes
    offset = tl.arange(0, BLOCK)
    highest, total, at, best = -float("inf"), 0.0, 0.0, 0
    mass = 0.0
    for start in range(0, num_classes, BLOCK):
        inside = start + offset < num_classes
        x = tl.load(logits_ptr + start + offset, mask=inside, other=-float("inf")).to(tl.float32)
        label = tl.load(label_ptr + start + offset, mask=inside, other=0.0)
        block_highest = tl.max(x, 0)
        first = tl.min(tl.where(x == block_highest, start + offset, num_classes), 0)
        best = tl.where(block_highest > highest, first, best)
        raised = tl.maximum(highest, block_highest)
        total = total * tl.exp(highest - raised) + tl.sum(tl.exp(x - raised), 0)
        highest = raised
        at += tl.sum(tl.where(inside, label * x, 0.0), 0)
        mass += tl.sum(label, 0)
    log_total = highest + tl.log(total)
    weight = tl.load(weight_ptr + place)
    tl.store(loss_ptr + place, weight * (mass * log_total - at))
    tl.store(choice_ptr + place, best.to(tl.int64))
    for start in range(0, num_classes, BLOCK):
        inside = start + offset < num_classes
        x = tl.load(logits_ptr + start + offset, mask=inside, other=0.0).to(tl.float32)
        label = tl.load(label_ptr + start + offset, mask=inside, other=0.0)
        tl.store(logits_ptr + start + offset, weight * (tl.exp(x - log_total) - label), mask=inside)


def soft_cross_entropy_triton(logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch, a program a row. See `soft_cross_entropy_`."""
    num_steps, num_rows, num_classes = _check(logits, label, weight)
    loss = torch.empty(num_steps, num_rows, dtype=torch.float32, device=logits.device)
    choice = torch.empty(num_steps, num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(num_classes))
        _soft_cross_entropy_kernel[(num_steps, num_rows)](
            logits, label, weight, loss, choice, num_rows, num_classes, BLOCK=block, num_warps=max(1, min(8, block // 512))
        )
    return loss, choice


def soft_cross_entropy_reference(logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `soft_cross_entropy_`."""
    _check(logits, label, weight)
    choice = logits.argmax(-1)
    log_q = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = -weight * torch.einsum("mv,kmv->km", label, log_q)
    logits.copy_(log_q.exp_().sub_(label).mul_(weight[..., None]))
    return loss, choice


def _check(logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int]:
    require("logits", logits, logits.dtype, -1, -1, -1)
    num_steps, num_rows, num_classes = logits.shape
    require("label", label, torch.float32, num_rows, num_classes)
    require("weight", weight, torch.float32, num_steps, num_rows)
    return num_steps, num_rows, num_classes


def soft_cross_entropy_(logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [K, M, V], label float32 [M, V], weight float32 [K, M]: loss float32 [K, M], choice int64 [K, M].

    `logits` is overwritten by the gradient of the summed loss.
    """
    launch = soft_cross_entropy_triton if logits.is_cuda else soft_cross_entropy_reference
    return launch(logits, label, weight)
