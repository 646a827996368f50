"""The loss of all unrolled steps at once, in pieces, so that logits over the vocabulary never live for more than a few rows.

Label row p has one label distribution, the target's softmax restricted to the draft vocabulary, for all steps: step k predicts it from
index p - k - 1. A row counts when the target's own choice is in the draft vocabulary and the engine would draft there.

    loss = sum_k decay^k / T * sum_p -label(p) . log softmax(head . normed_k(p - k - 1))

T counts every position of the optimizer step, those without a label too (draft-checkpoints 6.2). Gradients are made along
with the loss, piece by piece, see kernels/soft_cross_entropy. `temperature` below 1 sharpens the labels towards the target's choice.
Sources: Li et al., "EAGLE-3"; the fusion of head and loss as in Hsu et al., "Liger Kernel".
"""

from dataclasses import dataclass
from typing import Any

import torch

from eaglecli.kernels.soft_cross_entropy import soft_cross_entropy_

_PIECE_ELEMENTS = 1 << 28  # logits (rows x steps x draft vocabulary) of one piece


@dataclass(frozen=True, eq=False)
class Labels:
    """Where labels come from; M label rows, K steps."""

    hidden: torch.Tensor  # [T, Ht] the target's, past the final norm
    head: torch.Tensor  # [V, Ht] the target's head
    token_ids: torch.Tensor  # int64 [Vd] the draft vocabulary
    rows: torch.Tensor  # int64 [M]
    is_drafted: torch.Tensor  # bool [K, M]
    temperature: float = 1.0  # of the target's softmax


@dataclass(frozen=True, eq=False)
class DraftLoss:
    """`loss` float32 scalar with gradient. `is_hit` bool [K, M]: the draft's first choice is the target's choice."""

    loss: torch.Tensor
    is_hit: torch.Tensor


def draft_loss(normed: list[torch.Tensor], head: torch.Tensor, labels: Labels, decay: float, num_positions: int) -> DraftLoss:
    """normed: K tensors [T, H]; head [Vd, H] float32, the draft's."""
    weights = decay ** torch.arange(len(normed), device=head.device) / num_positions
    loss, is_hit = _FusedLoss.apply(torch.stack(normed), head, labels, weights)
    return DraftLoss(loss, is_hit)


class _FusedLoss(torch.autograd.Function):
    """Loss and its gradients in one pass over the label rows."""

    @staticmethod
    def forward(
        ctx: Any, normed: torch.Tensor, head: torch.Tensor, labels: Labels, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_steps, num_positions, hidden_size = normed.shape
        needs_gradient = any(ctx.needs_input_grad)
        flat, head_copy = normed.reshape(-1, hidden_size), head.to(normed.dtype)
        grad_flat = torch.zeros_like(flat) if needs_gradient else None
        grad_head = torch.zeros_like(head) if needs_gradient else None
        loss = torch.zeros((), device=normed.device)
        is_hit = torch.zeros_like(labels.is_drafted)
        offset = torch.arange(num_steps, device=normed.device)[:, None] * (num_positions - 1) - 1  # k * T + (p - k - 1), less p
        rows_per_piece = max(1, _PIECE_ELEMENTS // (num_steps * len(head)))
        for start in range(0, len(labels.rows), rows_per_piece):
            piece = slice(start, start + rows_per_piece)
            rows, is_drafted = labels.rows[piece], labels.is_drafted[:, piece]
            choice, label = _label(labels, rows)
            index = ((rows + offset) % len(flat)).flatten()  # no two are the same: where it wraps around, there is no label
            states = flat[index]
            logits = (states @ head_copy.t()).view(num_steps, len(rows), -1)
            in_vocabulary = labels.token_ids[torch.searchsorted(labels.token_ids, choice).clamp_(max=len(head) - 1)] == choice
            row_loss, first_choice = soft_cross_entropy_(logits, label, weights[:, None] * (is_drafted & in_vocabulary))
            loss += row_loss.sum()
            is_hit[:, piece] = (labels.token_ids[first_choice] == choice) & is_drafted
            if grad_flat is not None and grad_head is not None:
                grad_logits = logits.flatten(0, 1)
                grad_flat.index_copy_(0, index, grad_logits @ head_copy)
                grad_head += grad_logits.t() @ states
        if grad_flat is not None and grad_head is not None:
            ctx.save_for_backward(grad_flat.view_as(normed), grad_head)
        ctx.mark_non_differentiable(is_hit)
        return loss, is_hit

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_normed, grad_head = ctx.saved_tensors
        return grad_normed * grad_loss, grad_head * grad_loss, None, None


def _label(labels: Labels, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's choice int64 [m] and its softmax over the draft vocabulary, float32 [m, Vd]."""
    logits = labels.hidden[rows] @ labels.head.t()
    restricted = logits.index_select(1, labels.token_ids)  # a copy: it may be divided in place
    return logits.argmax(-1), torch.softmax(restricted.float().div_(labels.temperature), dim=-1)
