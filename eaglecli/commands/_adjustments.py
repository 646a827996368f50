"""Penalties, bias, least length and log-probabilities of one record: its own over the run's, held against each other and the vocabulary."""

from collections.abc import Mapping
from typing import Any

from eaglecli.config import GenerateSettings
from eaglecli.io.records import RecordFault
from eaglecli.io.sampling_options import ADJUSTING_OPTIONS

NAMES = (*ADJUSTING_OPTIONS, "logprobs")


def read_adjustments(own: Mapping[str, Any], settings: GenerateSettings, max_new_tokens: int, vocab_size: int | None) -> dict[str, Any]:
    """Fields of `SamplingParams`. Raises RecordFault (bad_option, too_long)."""
    values = {name: own[name] if name in own else getattr(settings, name) for name in NAMES}
    least = values["min_new_tokens"]
    if least > max_new_tokens:
        wanted = own.get("max_new_tokens", settings.max_new_tokens)
        if least > wanted:
            raise RecordFault("bad_option", f"`min_new_tokens` {least} is more than max_new_tokens {wanted}")
        raise RecordFault("too_long", f"the context has room for {max_new_tokens} new tokens, `min_new_tokens` is {least}")
    unknown = next((token for token, _ in values["logit_bias"] if vocab_size is not None and token >= vocab_size), None)
    if unknown is not None:
        raise RecordFault("bad_option", f"`logit_bias` names token {unknown}, the target has {vocab_size} tokens")
    return values


def describe_adjustments(settings: GenerateSettings) -> str:
    """Those of the run that change what is chosen, as the end of a sentence."""
    return "".join(f", {_shown(name, settings)}" for name, nothing in ADJUSTING_OPTIONS.items() if getattr(settings, name) != nothing)


def _shown(name: str, settings: GenerateSettings) -> str:
    if name == "logit_bias":
        return f"logit bias of {len(settings.logit_bias)} tokens"
    return f"{name.replace('_', ' ')} {getattr(settings, name):g}"
