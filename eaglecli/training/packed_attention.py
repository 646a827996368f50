"""Causal attention within the documents of a packed batch, and its union with keys that every index has for itself.

At unrolled step k the query of index t sees the step-0 keys of its document up to t, and one own key of each step 1..k.
The causal part can be any attention that gives the log-sum-exp of its scores; own keys are then merged in by it:

    lse = log(exp(lse_causal) + sum_j exp(s_j))       out = exp(lse_causal - lse) out_causal + sum_j exp(s_j - lse) v_j

The backward pass of the causal part is that of flash attention told the merged `out` and `lse`: its softmax weights are
exp(s - lse) and its correction is sum(grad_out * out), both of the whole row. So no score is ever stored, and memory grows
with T alone. Elsewhere (CPU, float32) the documents are taken one by one with all their scores, by autograd.
Sources: Li et al., "EAGLE-3" (training-time test); Dao, "FlashAttention-2"; Liu et al., "Ring Attention" (merging by log-sum-exp).
"""

from dataclasses import dataclass
from typing import Any

import torch

from eaglecli.kernels.attention_inputs import AttentionInputs

_HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of T packed positions begin and end."""

    starts: torch.Tensor  # int32 [D + 1]
    max_len: int


def unrolled_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    documents: Documents,
    scale: float,
) -> torch.Tensor:
    """q [T, nh, hd], keys and values [T, nkv, hd] of step 0, own ones [k, T, nkv, hd] of steps 1..k: [T, nh * hd]."""
    if q.is_cuda and q.dtype in _HALF_TYPES:
        out = _FlashUnion.apply(q, keys, values, own_keys, own_values, documents, scale)
    else:
        out = unrolled_attention_reference(q, keys, values, own_keys, own_values, documents, scale)
    return out.flatten(1)


def unrolled_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    documents: Documents,
    scale: float,
) -> torch.Tensor:
    """The same in plain torch, document by document: [T, nh, hd]."""
    bounds = documents.starts.tolist()
    pieces = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        part = slice(start, end)
        pieces.append(_attend_document(q[part], keys[part], values[part], own_keys[:, part], own_values[:, part], scale))
    return torch.cat(pieces)


def _attend_document(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor, scale: float
) -> torch.Tensor:
    count, num_kv_heads = len(q), keys.shape[1]
    grouped = q.unflatten(1, (num_kv_heads, -1))
    causal = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
    scores = torch.einsum("ingd,jnd->ngij", grouped, keys).masked_fill(~causal, -torch.inf)
    own_scores = torch.einsum("ingd,kind->ngik", grouped, own_keys)
    weights = (torch.cat((scores, own_scores), dim=-1).float() * scale).softmax(-1).to(q.dtype)
    shared, own = weights.split((count, len(own_keys)), dim=-1)
    out = torch.einsum("ngij,jnd->ingd", shared, values) + torch.einsum("ngik,kind->ingd", own, own_values)
    return out.flatten(1, 2)


class _FlashUnion(torch.autograd.Function):
    """The union by torch's variable-length flash attention; CUDA, 16 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own_keys: torch.Tensor,
        own_values: torch.Tensor,
        documents: Documents,
        scale: float,
    ) -> torch.Tensor:
        starts, longest = documents.starts, documents.max_len
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, keys, values, starts, starts, longest, longest, 0.0, True, False, scale=scale
        )
        if len(own_keys):
            out, lse = merge_own(q, own_keys, own_values, out, lse, scale)
        ctx.save_for_backward(q, keys, values, own_keys, own_values, out, lse, rng_state, unused)
        ctx.documents, ctx.scale = documents, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, keys, values, own_keys, own_values, out, lse, rng_state, unused = ctx.saved_tensors
        starts, longest = ctx.documents.starts, ctx.documents.max_len
        grad_out = grad_out.contiguous()
        grad_q, grad_keys, grad_values = torch.ops.aten._flash_attention_backward(
            grad_out, q, keys, values, out, lse, starts, starts, longest, longest, 0.0, True, rng_state, unused, scale=ctx.scale
        )
        grad_own_keys = grad_own_values = None
        if len(own_keys):
            grad_own_q, grad_own_keys, grad_own_values = own_gradients(q, own_keys, own_values, out, lse, grad_out, ctx.scale)
            grad_q = grad_q + grad_own_q
        return grad_q, grad_keys, grad_values, grad_own_keys, grad_own_values, None, None


def _grouped(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[T, nh, ...] to float32 [T, nkv, group, ...]."""
    return x.unflatten(1, (num_kv_heads, -1)).float()


def merge_own(
    q: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal `out` [T, nh, hd] and `lse` [nh, T] with the own keys [k, T, nkv, hd] merged in."""
    num_kv_heads = own_keys.shape[2]
    grouped = _grouped(q, num_kv_heads)
    scores = torch.stack([(grouped * key.unsqueeze(2)).sum(-1) for key in own_keys]) * scale
    causal_lse = _grouped(lse.t(), num_kv_heads)
    merged_lse = torch.logaddexp(causal_lse, scores.logsumexp(0))
    merged = _grouped(out, num_kv_heads) * (causal_lse - merged_lse).exp().unsqueeze(-1)
    for score, value in zip(scores, own_values, strict=True):
        merged = torch.addcmul(merged, (score - merged_lse).exp().unsqueeze(-1), value.unsqueeze(2).float())
    return merged.flatten(1, 2).to(q.dtype), merged_lse.flatten(1).t().contiguous()


def own_gradients(
    q: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the query (this part of it), own keys and own values, given the merged `out` [T, nh, hd] and `lse` [nh, T]."""
    num_kv_heads = own_keys.shape[2]
    grouped, grad = _grouped(q, num_kv_heads), _grouped(grad_out, num_kv_heads)
    correction = (grad * _grouped(out, num_kv_heads)).sum(-1)
    merged_lse = _grouped(lse.t(), num_kv_heads)
    grad_q = torch.zeros_like(grouped)
    grad_keys, grad_values = torch.empty_like(own_keys), torch.empty_like(own_values)
    for step, (key, value) in enumerate(zip(own_keys, own_values, strict=True)):
        key, value = key.unsqueeze(2).float(), value.unsqueeze(2).float()
        weight = ((grouped * key).sum(-1) * scale - merged_lse).exp()
        grad_score = (weight * ((grad * value).sum(-1) - correction) * scale).unsqueeze(-1)
        grad_values[step] = (weight.unsqueeze(-1) * grad).sum(2)
        grad_keys[step] = (grad_score * grouped).sum(2)
        grad_q.addcmul_(grad_score, key)
    return grad_q.flatten(1, 2).to(q.dtype), grad_keys, grad_values


def attend_packed(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: AttentionInputs, scale: float, window: int | None
) -> torch.Tensor:
    """The target's attention (`AttentionFunction`) over whole documents whose token t lies at slot t: CUDA, 16 bits. [T, nh * hd]."""
    count, starts, longest = len(q), inputs.query_start, inputs.max_query_len
    sizes = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k_cache[:count], v_cache[:count], starts, starts, longest, longest, 0.0, True, False, scale=scale, **sizes
    )
    return out.flatten(1)
