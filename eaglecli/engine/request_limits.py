"""What an engine can never run, said before it is asked to. No tensors: it is asked in processes that have no engine, too."""

from dataclasses import dataclass

from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.settings import EngineSettings


@dataclass(frozen=True)
class RequestLimits:
    """Of an engine of these settings whose model knows `vocab_size` tokens."""

    settings: EngineSettings
    vocab_size: int

    def refusal(self, request: Request) -> str | None:
        """Why a request can never run, or None."""
        settings, sampling = self.settings, request.sampling
        known = len(request.prompt_ids) + sampling.max_new_tokens
        if known > settings.context_length:
            asked = f"{len(request.prompt_ids)} prompt tokens and {sampling.max_new_tokens} new tokens"
            return f"{asked} pass the context of {settings.context_length}"
        pages = -(-(known + settings.lookahead) // settings.page_size)
        if pages > settings.num_pages:
            given = settings.num_pages * settings.page_size
            return f"{pages * settings.page_size} cache slots are needed, --max-total-tokens gives {given}"
        if len(sampling.stop_token_ids) > settings.max_stop_ids:
            return f"{len(sampling.stop_token_ids)} stop ids are more than the {settings.max_stop_ids} that a request may have"
        return _refuse_sampling(sampling, settings, self.vocab_size)


def _refuse_sampling(sampling: SamplingParams, settings: EngineSettings, vocab_size: int) -> str | None:
    """Why an engine of these settings cannot do what a request asks of its logits, or None."""
    if sampling.adjusts_logits and not settings.adjusts_logits:
        return "penalties, logit bias and least lengths need an engine that was opened for them"
    if sampling.logprobs is not None and (settings.max_logprobs is None or sampling.logprobs > settings.max_logprobs):
        return f"log-probabilities of {sampling.logprobs} alternatives need an engine that was opened for them"
    unknown = next((token for token, _ in sampling.logit_bias if not 0 <= token < vocab_size), None)
    return None if unknown is None else f"logit_bias names token {unknown}, the vocabulary has {vocab_size} tokens"
