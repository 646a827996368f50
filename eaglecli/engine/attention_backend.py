"""The ways to compute attention, each with what it declares about itself.

The engine asks a backend what it needs and never which one it is. One is chosen at the start and travels with the
addressing of every forward (`AttentionInputs.attend`).
"""

from dataclasses import dataclass

import torch

from eaglecli.errors import UserError
from eaglecli.kernels.attention import attention_reference, attention_triton
from eaglecli.kernels.attention_inputs import AttentionFunction


@dataclass(frozen=True)
class AttentionBackend:
    """`attend` has the signature of `kernels.attention.attention`."""

    name: str
    attend: AttentionFunction
    needs_host_lengths: bool  # its cost grows with the host's bound of lengths: no iteration may be in flight, nothing is captured
    accepts_slot_table: bool  # reads the cache through slot numbers: the only way the engine offers
    needs_cuda: bool

    def check(self, device: torch.device) -> None:
        """Raise UserError when the engine on this device has not what it needs."""
        if not self.accepts_slot_table:
            raise UserError(
                f"--attention-backend {self.name} cannot read the cache through a slot table", "use another --attention-backend"
            )
        if self.needs_cuda and device.type != "cuda":
            raise UserError(f"--attention-backend {self.name} needs a CUDA device", "use another --attention-backend, or leave it out")


TORCH = AttentionBackend("torch", attention_reference, needs_host_lengths=True, accepts_slot_table=True, needs_cuda=False)
TRITON = AttentionBackend("triton", attention_triton, needs_host_lengths=False, accepts_slot_table=True, needs_cuda=True)
BACKENDS = {backend.name: backend for backend in (TORCH, TRITON)}


def default_backend(device: torch.device) -> AttentionBackend:
    """The fastest one that runs on the device."""
    return TRITON if device.type == "cuda" else TORCH
