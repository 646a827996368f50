"""What the frozen target knows about a packed batch: the states that the draft starts from and those its labels come from."""

from dataclasses import dataclass

import torch

from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.models.target import TargetModel
from eaglecli.training.packed_attention import attend_packed
from eaglecli.training.packing import PackedBatch


@dataclass(frozen=True, eq=False)
class TargetStates:
    """features [T, k * Ht]: residual streams at the tapped boundaries; hidden [T, Ht]: past the final norm."""

    features: torch.Tensor
    hidden: torch.Tensor


class FrozenTarget:
    """Runs the target over packed documents, each from its start, on a scratch cache that is written over every time."""

    def __init__(self, model: TargetModel, tap_boundaries: tuple[int, ...]) -> None:
        self.model, self.tap_boundaries = model, tap_boundaries
        self._cache: torch.Tensor | None = None

    @torch.no_grad()
    def run(self, batch: PackedBatch) -> TargetStates:
        """States of every position of the batch."""
        output = self.model.forward(
            batch.input_ids, batch.positions, self._scratch(batch.num_positions), self._inputs(batch), self.tap_boundaries
        )
        return TargetStates(output.features, output.hidden)

    def feature_rms(self, batch: PackedBatch) -> torch.Tensor:
        """float32 [F]: root mean square of every channel of the features where the batch has labels."""
        return self.run(batch).features[batch.label_rows].float().pow(2).mean(0).sqrt()

    def _inputs(self, batch: PackedBatch) -> AttentionInputs:
        """One row a document, token t at slot t, no prefix."""
        device, num_documents = batch.starts.device, len(batch.starts) - 1
        columns = torch.arange(batch.max_document_len, dtype=torch.int32, device=device)
        table = (batch.starts[:-1, None] + columns).clamp(max=batch.num_positions - 1)
        uses_flash = device.type == "cuda" and self.model.dtype in (torch.bfloat16, torch.float16)
        return AttentionInputs(
            rows=torch.arange(num_documents, dtype=torch.int32, device=device),
            query_start=batch.starts,
            prefix_lens=torch.zeros(num_documents, dtype=torch.int32, device=device),
            slot_table=table,
            out_slots=torch.arange(batch.num_positions, dtype=torch.int32, device=device),
            positions=batch.positions,
            tail_mask=None,
            max_query_len=batch.max_document_len,
            max_prefix_len=0,
            attend=attend_packed if uses_flash else None,
        )

    def _scratch(self, num_slots: int) -> torch.Tensor:
        config = self.model.config
        if self._cache is None or self._cache.shape[2] < num_slots:
            shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
            self._cache = torch.empty(shape, dtype=self.model.dtype, device=self.model.embed_weight.device)
        return self._cache
