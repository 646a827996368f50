"""The config.json of an EAGLE-3 draft that we make ourselves, in the layout that SafeAILab and SpecForge publish."""

from typing import Any

from eaglecli.models.config import LayerConfig, TargetConfig


def eagle3_config(
    target: TargetConfig, layer: LayerConfig, draft_vocab_size: int, rope_theta: float, max_position_embeddings: int
) -> dict[str, Any]:
    """A draft of one layer without biases, tapping at the default boundaries; `layer` gives its sizes."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": rope_theta,
        "max_position_embeddings": max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
