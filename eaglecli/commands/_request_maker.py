"""From a record to a request: tokens, sampling settings of this record, seed, room for the answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from eaglecli.commands._adjustments import describe_adjustments, read_adjustments
from eaglecli.commands._dialogues import Dialogues
from eaglecli.commands._samples import SamplePlan
from eaglecli.config import DEFAULT, GenerateSettings
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.io.chat_messages import Message
from eaglecli.io.prompt_encoder import Prompt, PromptEncoder
from eaglecli.io.record_ids import request_seed
from eaglecli.io.records import PromptRecord, RecordError, RecordFault
from eaglecli.io.scan import InputScan
from eaglecli.io.stop_strings import watch_maker
from eaglecli.io.tokenizer import PromptTokenizer


@dataclass(frozen=True, eq=False)
class RequestRules:
    """What an engine asks of requests."""

    context_length: int
    end_token_ids: tuple[int, ...]  # of the model; none: the tokenizer's own
    max_stop_ids: int
    vocab_size: int | None  # tokens that a logit bias may name; None: it is not known
    refusal: Callable[[Request], str | None]  # why the engine can never run it


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request, or the error that its record ends as; plain data. `record` is given where further turns will be asked."""

    result: Request | RecordError
    record: PromptRecord | None = None
    stop_strings: tuple[str, ...] = ()


@dataclass
class RequestMaker:
    """Turns records into requests: tokens, sampling settings of this record, seed, room for the answer."""

    settings: GenerateSettings
    tokenizer: PromptTokenizer
    rules: RequestRules
    uses_template_for_prompts: bool = field(init=False)
    end_token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.uses_template_for_prompts = self.settings.apply_chat_template and self.tokenizer.has_chat_template
        self.encoder = PromptEncoder(self.tokenizer, self.uses_template_for_prompts, self.settings.system_prompt)
        self.dialogues = Dialogues(self.tokenizer, self._next_turn)
        own = self.tokenizer.eos_token_id
        self.end_token_ids = self.rules.end_token_ids or (() if own is None else (own,))

    def describe(self, scan: InputScan) -> str:
        """How prompts become tokens and where answers end, in one sentence."""
        settings = self.settings
        form = "one user message of the chat template" if self.uses_template_for_prompts else "raw text"
        cap = f"at most {settings.max_new_tokens} new tokens" + ("" if settings.origin("max_new_tokens") != DEFAULT else " (default)")
        prompts = f"a `prompt` becomes {form}; " if not scan.is_complete or scan.kinds.get("prompt") else ""
        sampling = f"temperature {settings.temperature:g}, seed {settings.random_seed}" + describe_adjustments(settings)
        if settings.num_samples > 1:
            alike = "" if settings.temperature else ", all alike at temperature 0"
            sampling += f", {settings.num_samples} answers to each record{alike}"
        return f"{prompts}{cap}, context {self.rules.context_length} tokens, {sampling}"

    def prepare(self, record: PromptRecord | RecordError) -> Request | RecordError:
        """The request of a record's first sample, or the error that this record ends as."""
        result = self._prepare(record)
        if isinstance(result, RecordError) or isinstance(record, RecordError):
            return result
        return self._with_watch(result, self._stop_strings(record))

    def prepare_samples(self, record: PromptRecord | RecordError, plan: SamplePlan) -> Iterator[Prepared]:
        """All samples that are left, of one encoded prompt, each to be shown to `take` in the process of the engine."""
        first = self._prepare(record)
        if isinstance(first, RecordError) or isinstance(record, RecordError):
            yield Prepared(first)
            return
        asked_again, strings = record if first.num_follow_ups else None, self._stop_strings(record)
        for sample in plan.left(record):
            yield Prepared(replace(first, sample=sample) if sample else first, asked_again, strings)

    def take(self, prepared: Prepared) -> Request | RecordError:
        """What was prepared, perhaps in another process, with all that hangs on it here: its dialogue and its watch."""
        result = prepared.result
        if isinstance(result, RecordError):
            return result
        if prepared.record is not None:
            self.dialogues.begin(prepared.record, result.sample)
        return self._with_watch(result, prepared.stop_strings)

    def _prepare(self, record: PromptRecord | RecordError) -> Request | RecordError:
        if isinstance(record, RecordError):
            return record
        try:
            return self._request(record, self.encoder.opening(record), sample=0)
        except RecordFault as fault:
            is_skipped = fault.code == "too_long" and self.settings.too_long == "skip"
            return RecordError(record.key, fault.code, fault.message, record.raw, is_skipped=is_skipped)

    def _next_turn(self, record: PromptRecord, messages: list[Message], sample: int) -> Request:
        num_asked = sum(message["role"] == "user" for message in messages)
        request = self._request(record, self.encoder.conversation(messages), sample, num_asked)
        return self._with_watch(request, self._stop_strings(record))

    def _with_watch(self, request: Request, strings: tuple[str, ...]) -> Request:
        if not strings:
            return request
        return replace(request, make_stop_watch=watch_maker(strings, self.tokenizer.token_bytes, request.sampling.min_new_tokens))

    def _request(self, record: PromptRecord, prompt: Prompt, sample: int, num_asked: int = 1) -> Request:
        prompt_ids = self.encoder.encode(prompt)
        limit, num_tokens = self._most_prompt_tokens(record, len(prompt_ids)), len(prompt_ids)
        if num_tokens > limit:
            prompt_ids = self.encoder.encode_within(prompt, limit, "left" if self.settings.too_long == "truncate-left" else "right")
        key = replace(record.key, num_cut_prompt_tokens=num_tokens - len(prompt_ids)) if num_tokens > len(prompt_ids) else record.key
        num_follow_ups = len(record.turns) - num_asked if record.turns else 0
        request = Request(key, prompt_ids, self._sampling(record, len(prompt_ids)), sample, num_follow_ups=num_follow_ups)
        reason = self.rules.refusal(request)
        if reason:
            raise RecordFault("too_long", reason)
        return request

    def _most_prompt_tokens(self, record: PromptRecord, prompt_len: int) -> int:
        """Where a prompt is cut when that is asked for. A cap that nobody gave leaves at most half of the context for the answer."""
        if self.settings.too_long not in ("truncate-left", "truncate-right"):
            return prompt_len
        wanted, context = record.options.get("max_new_tokens", self.settings.max_new_tokens), self.rules.context_length
        if self._is_cap_given(record):
            return max(context - wanted, 1)
        return prompt_len if prompt_len < context else context - min(wanted, context // 2)

    def _is_cap_given(self, record: PromptRecord) -> bool:
        return "max_new_tokens" in record.options or self.settings.origin("max_new_tokens") != DEFAULT

    def _sampling(self, record: PromptRecord, prompt_len: int) -> SamplingParams:
        own, settings = record.options, self.settings
        ends = () if own.get("ignore_eos", settings.ignore_eos) else self.end_token_ids
        named = [self.tokenizer.silent_tokens[text] for text in self._stop_strings(record) if text in self.tokenizer.silent_tokens]
        stop_ids = tuple(dict.fromkeys((*ends, *own.get("stop_token_ids", settings.stop_token_ids), *named)))
        if len(stop_ids) > self.rules.max_stop_ids:
            raise RecordFault(
                "bad_option", f"{len(stop_ids)} stop token ids (end of text included) are more than the {self.rules.max_stop_ids} allowed"
            )
        max_new_tokens = self._max_new_tokens(record, prompt_len)
        return SamplingParams(
            temperature=own.get("temperature", settings.temperature),
            top_p=own.get("top_p", settings.top_p),
            top_k=own.get("top_k", settings.top_k),
            min_p=own.get("min_p", settings.min_p),
            seed=own["seed"] if "seed" in own else request_seed(settings.random_seed, record.key),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_ids,
            **read_adjustments(own, settings, max_new_tokens, self.rules.vocab_size),
        )

    def _stop_strings(self, record: PromptRecord) -> tuple[str, ...]:
        """One that is the text of a control token, which no answer shows, means the token as well: see `_sampling`."""
        return record.options.get("stop", self.settings.stop)

    def _max_new_tokens(self, record: PromptRecord, prompt_len: int) -> int:
        """A cap that was given must fit; the default one shrinks to the room that is left."""
        wanted = record.options.get("max_new_tokens", self.settings.max_new_tokens)
        context = self.rules.context_length
        if self._is_cap_given(record) and prompt_len + wanted > context:
            total = prompt_len + wanted
            raise RecordFault(
                "too_long", f"{prompt_len} prompt tokens and max_new_tokens {wanted} make {total}, the context is {context} tokens"
            )
        if prompt_len >= context:
            raise RecordFault("too_long", f"{prompt_len} prompt tokens leave no room in the context of {context} tokens")
        return min(wanted, context - prompt_len)
