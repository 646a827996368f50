"""The ways to compute attention, each with what it declares about itself.

The engine asks a backend what it needs and never which one it is. One is chosen at the start and travels with the
addressing of every forward (`AttentionInputs.attend`).
"""

from dataclasses import dataclass, replace

import torch

from eaglecli.errors import UserError
from eaglecli.kernels.attention import attention_reference, attention_triton
from eaglecli.kernels.attention_inputs import AttentionFunction, QkvAttentionFunction
from eaglecli.kernels.qkv_attention import qkv_attention_triton
from eaglecli.kernels.row_invariant_attention import row_invariant_attention_reference, row_invariant_attention_triton


@dataclass(frozen=True)
class AttentionBackend:
    """`attend` has the signature of `kernels.attention.attention`."""

    name: str
    attend: AttentionFunction
    needs_host_lengths: bool  # its cost grows with the host's bound of lengths: no iteration may be in flight, nothing is captured
    accepts_slot_table: bool  # reads the cache through slot numbers: the only way the engine offers
    needs_cuda: bool
    row_invariant: AttentionFunction  # the same, no bit of which depends on the other queries
    row_invariant_on: str  # the device type where it is so
    attend_qkv: QkvAttentionFunction | None = None  # rotary embedding and store in the same launch, if it can

    def check(self, device: torch.device) -> None:
        """Raise UserError when the engine on this device has not what it needs."""
        if not self.accepts_slot_table:
            raise UserError(
                f"--attention-backend {self.name} cannot read the cache through a slot table", "use another --attention-backend"
            )
        if self.needs_cuda and device.type != "cuda":
            raise UserError(f"--attention-backend {self.name} needs a CUDA device", "use another --attention-backend, or leave it out")

    def made_row_invariant(self, device: torch.device) -> "AttentionBackend":
        """This backend for --enable-deterministic-inference. Raises UserError where it has no such form."""
        if device.type != self.row_invariant_on:
            raise UserError(
                f"--enable-deterministic-inference cannot use --attention-backend {self.name} on {device.type}: "
                "its sums depend on the batch there",
                "leave --attention-backend out",
            )
        return replace(self, attend=self.row_invariant, attend_qkv=None)


TORCH = AttentionBackend(
    "torch",
    attention_reference,
    needs_host_lengths=True,
    accepts_slot_table=True,
    needs_cuda=False,
    row_invariant=row_invariant_attention_reference,
    row_invariant_on="cpu",
)
TRITON = AttentionBackend(
    "triton",
    attention_triton,
    needs_host_lengths=False,
    accepts_slot_table=True,
    needs_cuda=True,
    row_invariant=row_invariant_attention_triton,
    row_invariant_on="cuda",
    attend_qkv=qkv_attention_triton,
)
BACKENDS = {backend.name: backend for backend in (TORCH, TRITON)}


def default_backend(device: torch.device) -> AttentionBackend:
    """The fastest one that runs on the device."""
    return TRITON if device.type == "cuda" else TORCH


def choose_attention(wanted: AttentionBackend | None, device: torch.device, is_deterministic: bool) -> AttentionBackend:
    """The backend that was asked for (None: the fastest), in the form that the run needs. Raises UserError when it cannot be had."""
    backend = wanted or default_backend(device)
    backend.check(device)
    return backend.made_row_invariant(device) if is_deterministic else backend
