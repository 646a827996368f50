"""How large a KV cache is."""

import torch

from eaglecli.models.config import TargetConfig
from eaglecli.models.draft_model import DraftModel


def cache_bytes_per_token(dtype: torch.dtype, *models: TargetConfig | DraftModel | None) -> int:
    """Bytes of one slot in the caches of all `models`: keys and values of every layer. None is a model that is not there."""
    return sum(2 * model.num_layers * model.num_kv_heads * model.head_dim for model in models if model is not None) * dtype.itemsize
