"""An EAGLE-3 draft of random weights for any target, made in memory: for speed runs where no trained draft is at hand.

One layer of the target's own sizes, a vocabulary of the first 32,000 ids at most, default taps. What it proposes is noise.
"""

from pathlib import Path

import torch

from eaglecli.models.config import TargetConfig
from eaglecli.models.draft_config import build_draft_config, read_draft_settings
from eaglecli.models.draft_description import DraftDescription
from eaglecli.models.draft_fit import DraftFit
from eaglecli.models.draft_layout import read_layout
from eaglecli.models.draft_loader import LoadedDraft
from eaglecli.models.eagle3 import Eagle3Draft
from eaglecli.models.fill import fill_with_noise
from eaglecli.models.loader import LoadedTarget
from eaglecli.models.published_draft import eagle3_config
from eaglecli.models.rope import rope_tables

DUMMY_DRAFT = "dummy"
_NAME = "dummy draft"
_MAX_DRAFT_VOCAB_SIZE = 32_000
_HEAD = "lm_head.weight"


def dummy_draft_fit(target: TargetConfig) -> DraftFit:
    """The description of the draft, as that of a checkpoint that fits. Raises ModelError for a target with too few layers to tap."""
    vocab_size = min(_MAX_DRAFT_VOCAB_SIZE, target.vocab_size)
    shapes = _shapes(target, vocab_size)
    layout = read_layout(shapes, _NAME)
    config = eagle3_config(target, target.layer, vocab_size, target.rope.theta, target.max_position_embeddings)
    settings = read_draft_settings(config, None, _NAME)
    canonical = {name: shapes[stored] for name, stored in layout.file_names.items()}
    description = DraftDescription(
        path=Path(_NAME),
        layout=layout,
        settings=settings,
        shapes=canonical,
        dtypes=dict.fromkeys(canonical, torch.float32),
        d2t=torch.zeros(vocab_size, dtype=torch.int64),
        t2d=None,
    )
    return DraftFit(
        description=description,
        config=build_draft_config(settings, layout, canonical, target),
        head="own",
        num_head_rows=vocab_size,
        token_map=torch.arange(vocab_size),
        token_map_source=f"the first {vocab_size} of {target.vocab_size} ids",
        warnings=(),
    )


def build_dummy_draft(
    fit: DraftFit, target: LoadedTarget, dtype: torch.dtype, device: torch.device | str, context_length: int, seed: int = 1
) -> LoadedDraft:
    """The draft of `dummy_draft_fit` on its device; the embedding is the target's."""
    config = fit.config
    head = torch.empty(fit.num_head_rows, config.layer.hidden_size, dtype=dtype, device=device)
    token_map = None if fit.token_map is None else fit.token_map.to(device)
    tables = rope_tables(config.rope, context_length, device)
    model = Eagle3Draft(config, tables, target.model.embed_weight, head, token_map, dtype, device)
    fill_with_noise({**model.checkpoint_views(), _HEAD: head}, seed)
    taps = ", ".join(map(str, config.taps.boundaries))
    summary = (f"EAGLE-3, 1 layer, random weights from seed {seed}", f"taps at {taps}", f"vocabulary: {fit.token_map_source}")
    return LoadedDraft(model, fit, summary, ())


def _shapes(target: TargetConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Published tensor names and shapes."""
    layer = target.layer
    hidden, inner = layer.hidden_size, layer.intermediate_size
    q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj.weight": (q_size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q_size),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "fc.weight": (hidden, 3 * hidden),
        _HEAD: (vocab_size, hidden),
        "d2t": (vocab_size,),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    return shapes | {f"{norm}.weight": (hidden,) for norm in norms}
