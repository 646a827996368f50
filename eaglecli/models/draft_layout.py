"""Which draft a checkpoint holds, told by the tensors in it, under one set of names.

Published drafts spell the same tensors in several ways (SafeAILab, SGLang, SpecForge, speculators, HASS, Mistral's own
files). `read_layout` renames them to the SafeAILab names with numbered layers, and says which algorithm they belong to.
The `architectures` string of a config is not looked at: it is unreliable.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eaglecli.errors import ModelError

Algorithm = Literal["EAGLE", "EAGLE3"]  # "EAGLE" is EAGLE-1 and EAGLE-2: the same weights

ALGORITHM_TITLES: dict[Algorithm, str] = {"EAGLE": "EAGLE-1/2", "EAGLE3": "EAGLE-3"}

_PREFIXES = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "eagle_linear.": "fc.", "fusion_fc.": "fc."}

_EXACT_NAMES = {
    "embed_layernorm.weight": "embedding_layernorm.weight",
    "lm_head_layernorm.weight": "pre_lm_head_layernorm.weight",
    "hidden_layernorm.weight": "layers.0.input_layernorm.weight",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
    "tok_embeddings.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
}

_MISTRAL_LAYER_PARTS = {
    "attention.wq.": "self_attn.q_proj.",
    "attention.wk.": "self_attn.k_proj.",
    "attention.wv.": "self_attn.v_proj.",
    "attention.wo.": "self_attn.o_proj.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
}

_REFUSED_PARTS = {
    "kv_a_proj_with_mqa": "multi-head latent attention (MLA)",
    "qscale": "quantized weights",
    "weight_scale": "quantized weights",
    "qweight": "quantized weights",
    "experts": "a mixture of experts",
}

_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class DraftLayout:
    """The tensors of a draft file under canonical names.

    `file_names` maps canonical to file names, `ignored` the other tensors of the file to the reason why they are not used.
    """

    algorithm: Algorithm
    spelling: str  # whose names the file uses, for people
    file_names: Mapping[str, str]
    ignored: Mapping[str, str]
    num_layers: int

    @property
    def has_interleaved_rotary(self) -> bool:
        """Whether q and k rows are ordered for rotation of neighbouring pairs, as Mistral's own files are."""
        return self.spelling == "Mistral-native"

    def spell(self, name: str) -> str:
        """A canonical name as this file writes it, or would write it."""
        if name in self.file_names:
            return self.file_names[name]
        uses_midlayer = any(file_name.startswith("midlayer.") for file_name in self.file_names.values())
        return name.replace("layers.0.", "midlayer.") if uses_midlayer else name


def read_layout(shapes: Mapping[str, tuple[int, ...]], where: str) -> DraftLayout:
    """Name the tensors of a draft file; `shapes` maps file names to shapes.

    Raises ModelError for a file that is no EAGLE draft, for a kind that is not supported, and for two tensors of one meaning.
    """
    _refuse_unsupported(shapes, where)
    ignored = {name: "rotary table, computed here" for name in shapes if name.endswith("rotary_emb.inv_freq")}
    file_names: dict[str, str] = {}
    for name in shapes:
        if name in ignored:
            continue
        canonical = _canonical_name(name)
        if canonical in file_names:
            raise ModelError(f"{where}: tensors {file_names[canonical]} and {name} stand for the same parameter")
        file_names[canonical] = name
    canonical_shapes = {canonical: shapes[name] for canonical, name in file_names.items()}
    algorithm = _detect_algorithm(canonical_shapes, where)
    return DraftLayout(algorithm, _spelling(shapes, algorithm), file_names, ignored, _count_layers(file_names, where))


def _refuse_unsupported(names: Mapping[str, tuple[int, ...]], where: str) -> None:
    for name in names:
        for part, meaning in _REFUSED_PARTS.items():
            if part in name:
                raise ModelError(f"{where}: draft with {meaning} is not supported (tensor {name})")


def _canonical_name(name: str) -> str:
    bare = name.removeprefix("model.")
    for prefix, replacement in _PREFIXES.items():
        if bare.startswith(prefix):
            return replacement + bare.removeprefix(prefix)
    layer = _LAYER_NAME.fullmatch(bare)
    return _EXACT_NAMES.get(bare, bare) if layer is None else f"layers.{layer[1]}.{_canonical_layer_part(int(layer[1]), layer[2])}"


def _canonical_layer_part(layer: int, part: str) -> str:
    for mistral_part, replacement in _MISTRAL_LAYER_PARTS.items():
        if part.startswith(mistral_part):
            return replacement + part.removeprefix(mistral_part)
    # Only layer 0 has a norm of its own for the hidden state; behind it SGLang uses that name for the ordinary input norm.
    return "input_layernorm.weight" if part == "hidden_norm.weight" and layer > 0 else part


def _detect_algorithm(shapes: Mapping[str, tuple[int, ...]], where: str) -> Algorithm:
    if "layers.0.hidden_norm.weight" in shapes or _takes_two_inputs(shapes):
        return "EAGLE3"
    fc_shape = shapes.get("fc.weight", ())
    if len(fc_shape) == 2 and fc_shape[1] == 2 * fc_shape[0]:
        return "EAGLE"
    if len(fc_shape) == 2:
        raise ModelError(f"{where}: fc.weight is {list(fc_shape)}, and without a hidden_norm an EAGLE-1/2 draft needs [H, 2H]")
    if "layers.0.self_attn.q_proj.weight" in shapes:
        raise ModelError(
            f"{where}: this is an ordinary language model, not an EAGLE draft (it has neither fc.weight nor hidden_norm)",
            "give a draft that was trained for the target with --draft, or --draft none for plain decoding",
        )
    raise ModelError(f"{where}: no EAGLE draft: neither fc.weight nor a decoder layer is among its {len(shapes)} tensors")


def _takes_two_inputs(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    query_shape = shapes.get("layers.0.self_attn.q_proj.weight", ())
    output_shape = shapes.get("layers.0.self_attn.o_proj.weight", ())
    return len(query_shape) == len(output_shape) == 2 and query_shape[1] == 2 * output_shape[0]


def _count_layers(names: Mapping[str, str], where: str) -> int:
    numbers = {int(layer[1]) for layer in map(_LAYER_NAME.fullmatch, names) if layer is not None}
    if numbers != set(range(len(numbers))) or not numbers:
        raise ModelError(f"{where}: decoder layers are numbered {sorted(numbers)}, expected 0, 1, ...")
    return len(numbers)


def _spelling(names: Mapping[str, tuple[int, ...]], algorithm: Algorithm) -> str:
    """Whose spelling the names follow: for the summary line, and for the row order of Mistral's q and k."""
    bare_names = [name.removeprefix("model.") for name in names]
    if any(".attention.w" in name for name in bare_names):
        return "Mistral-native"
    if any(name.startswith(("fusion_fc.", "transformer.")) for name in bare_names):
        return "speculators"
    if any(name.startswith("model.") for name in names):
        return "SGLang"
    if algorithm == "EAGLE3":
        return "SafeAILab/SpecForge" if any(name.startswith("midlayer.") for name in names) else "speculators"
    return "HASS" if "hidden_states_layernorm.weight" in names else "SafeAILab"
