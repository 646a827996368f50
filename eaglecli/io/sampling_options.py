"""Sampling options of a record: which names are taken, their types and ranges, and the names that are known but not honoured.

The same ranges hold for the flags and the config file (`config.py` names the checks from here).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eaglecli.config import MAX_LOGPROBS, SAMPLING_CHECKS
from eaglecli.io.record_ids import MAX_SEED
from eaglecli.io.records import RecordFault

ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "random_seed": "seed", "n": "num_samples"}

# Names under which other engines and APIs take sampling options. A record that carries one wants something that is not
# done here; leaving it out silently would give text that its author did not ask for.
UNSUPPORTED = frozenset(
    """best_of num_return_sequences use_beam_search num_beams beam_width do_sample
    stop_strings stop_sequences stop_regex include_stop_str_in_output no_stop_trim
    max_completion_tokens max_length min_length length_penalty encoder_repetition_penalty no_repeat_ngram_size
    logits_processors logits_processor bad_words bad_words_ids suppress_tokens allowed_token_ids
    top_logprobs prompt_logprobs return_logprob logprob_start_len top_logprobs_num
    typical_p top_a tfs top_n_sigma xtc_probability xtc_threshold dry_multiplier mirostat mirostat_mode epsilon_cutoff eta_cutoff
    smoothing_factor dynatemp_range penalty_alpha guidance_scale
    response_format json_schema regex ebnf grammar structural_tag structured_outputs guided_json guided_regex guided_choice guided_grammar
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens custom_params sampling_params
    thinking_budget reasoning_effort""".split()
)


def option_name(name: str) -> str:
    """The flag's name of an option that a record may give under another one."""
    return ALIASES.get(name, name)


def read_options(record: Mapping[str, Any], is_text: bool = False) -> dict[str, Any]:
    """The checked options of one record; null counts as not given. Raises RecordFault (bad_option, unsupported).

    `is_text`: all values are text, as in a CSV table; an empty one counts as not given.
    """
    options: dict[str, Any] = {}
    for name, value in record.items():
        if value is None or (is_text and value == ""):
            continue
        if name in UNSUPPORTED:
            raise RecordFault("unsupported", f"the sampling option `{name}` is not supported")
        option = option_name(name)
        check = RECORD_CHECKS.get(option)
        if check is None:
            continue
        if is_text:
            value = _from_text(option, value)
        if option in options:
            raise RecordFault("bad_option", f"`{option}` is given twice, once as `{name}`")
        try:
            options[option] = check(value)
        except ValueError as error:
            raise RecordFault("bad_option", f"`{name}` {error}") from None
    return options


def _from_text(option: str, value: str) -> Any:
    """A value as JSON if it is any. A stop string stays as it stands, unless it is a list: 42 is a text there."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if option == "stop" and not isinstance(parsed, list) else parsed


def _check_seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
        raise ValueError(f"must be an integer from 0 to 2^63 - 1, not {str(value)[:40]}")
    return value


RECORD_CHECKS: dict[str, Callable[[Any], Any]] = {
    **SAMPLING_CHECKS,
    "seed": _check_seed,
}


@dataclass(frozen=True)
class SamplingNeeds:
    """What must be prepared in an engine before the first request: it costs memory and time, so only what is asked for is."""

    adjusts_logits: bool = False  # penalties, logit bias, a least length
    max_logprobs: int | None = None  # most alternatives that log-probabilities are asked of

    def and_of(self, options: Mapping[str, Any]) -> "SamplingNeeds":
        """These needs and those of the options of a record, or of a run's settings by name."""
        adjusts = self.adjusts_logits or any(options.get(name, nothing) != nothing for name, nothing in ADJUSTING_OPTIONS.items())
        logprobs = options.get("logprobs")
        if logprobs is None or (self.max_logprobs is not None and self.max_logprobs >= logprobs):
            logprobs = self.max_logprobs
        return self if (adjusts, logprobs) == (self.adjusts_logits, self.max_logprobs) else SamplingNeeds(adjusts, logprobs)


ADJUSTING_OPTIONS: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "min_new_tokens": 0,
}
EVERY_NEED = SamplingNeeds(adjusts_logits=True, max_logprobs=MAX_LOGPROBS)  # of a stream, whose records nobody knows yet
