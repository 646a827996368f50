"""`generate --dry-run`: everything that can be known without a GPU and without weights, in seconds. Nothing is written."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eaglecli.commands._chat_template import prepare_tokenizer
from eaglecli.commands._engine_settings import MAX_STOP_IDS, wanted_cache_tokens
from eaglecli.commands._open_engine import FoundModels, plan_of, run_dtype
from eaglecli.commands._request_maker import RequestMaker, RequestRules
from eaglecli.commands._resume import find_run_to_take_up, identify
from eaglecli.config import GenerateSettings
from eaglecli.engine.cache_size import cache_bytes_per_token
from eaglecli.engine.request import Request
from eaglecli.errors import ExitCode
from eaglecli.io.console import visible
from eaglecli.io.earlier_run import read_results
from eaglecli.io.records import PromptRecord, RecordError
from eaglecli.io.run_identity import refuse_other_run
from eaglecli.io.run_report import SCHEMA_VERSION, RunReport
from eaglecli.io.tokenizer import PromptTokenizer
from eaglecli.models.checkpoint import read_tensor_headers
from eaglecli.models.draft_fit import shape_only_model
from eaglecli.models.fill import check_headers
from eaglecli.models.target import TargetModel

NUM_COUNTED_RECORDS = 1000
MAX_SHOWN_CHARACTERS = 1500
GIB, MIB = 2**30, 2**20
HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True)
class DryRunResult:
    """`lines` for people, `document` for --json; `exit_code` is what the run would end with as far as it can be known."""

    exit_code: ExitCode
    settings: GenerateSettings
    lines: tuple[str, ...]
    document: dict[str, Any]


@dataclass(frozen=True)
class TokenCounts:
    """Prompt tokens of the first records, and of all if the rest is like them."""

    num_counted: int
    num_refused: int
    num_tokens: int
    longest: int
    num_expected: int | None  # None when the input is a stream

    def describe(self) -> str:
        """One line for people."""
        if not self.num_counted:
            return "prompt tokens: no prompt could be made"
        mean = self.num_tokens / self.num_counted
        more = "" if self.num_expected is None else f"; about {self.num_expected} in all"
        refused = f"; {self.num_refused} of these records are refused" if self.num_refused else ""
        return f"prompt tokens: {self.num_tokens} in the first {self.num_counted}, mean {mean:.1f}, longest {self.longest}{more}{refused}"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of what is allocated once. Activations come on top."""

    weights: int
    draft_weights: int
    cache: int
    cache_tokens: int

    def describe(self) -> str:
        """One line for people."""
        total = self.weights + self.draft_weights + self.cache
        draft = f", draft {_size(self.draft_weights)}" if self.draft_weights else ""
        cache = f"cache of {self.cache_tokens} tokens {_size(self.cache)}"
        return f"memory: weights {_size(self.weights)}{draft}, {cache}: {_size(total)}, and activations on top"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def dry_run(report: RunReport, models: FoundModels | None) -> DryRunResult:
    """`models` None: no record can be used. Raises UserError and ModelError as the run itself would."""
    lines, document = _describe_earlier(report, models)
    if models is None:
        code = ExitCode.NOTHING_DONE
    else:
        report.settings = settings = report.settings.with_generation_config(models.generation_config)
        tokenizer = prepare_tokenizer(models.load_tokenizer(), settings)
        maker = RequestMaker(settings, tokenizer, rules_without_engine(models, settings))
        counts, first = _count_tokens(report, maker)
        memory = estimate_memory(models, settings)
        lines += [*_describe_draft(models), *_show_prompt(tokenizer, first), counts.describe(), memory.describe()]
        document |= {"prompt_tokens": vars(counts), "memory_bytes": vars(memory), "first_prompt": _text_of(tokenizer, first)}
        failed = report.scan.num_bad or counts.num_refused
        code = ExitCode.NOTHING_DONE if first is None else ExitCode.PARTIAL if failed else ExitCode.OK
    scan = report.scan
    counted = {"records": scan.num_records, "good": scan.num_good, "bad": scan.num_bad, "kinds": dict(scan.kinds)}
    lines.append(f"dry run: nothing was generated; as far as can be told the run would end with exit code {int(code)}")
    document |= {"schema_version": SCHEMA_VERSION, "exit_code": int(code), "counts": counted}
    return DryRunResult(code, report.settings, tuple(visible(line) for line in lines), document)


def rules_without_engine(models: FoundModels, settings: GenerateSettings) -> RequestRules:
    """What can be known before an engine is opened: nothing is refused for its memory."""
    config = models.target_config
    return RequestRules(models.context_length(settings), config.eos_token_ids, MAX_STOP_IDS, config.vocab_size, lambda request: None)


def _describe_earlier(report: RunReport, models: FoundModels | None) -> tuple[list[str], dict[str, Any]]:
    """What the run would find in its directory. Raises UserError when it would refuse it."""
    earlier = find_run_to_take_up(report.output, report.settings)
    if earlier is None:
        return [f"results would go to {report.output}"], {"output": str(report.output), "answers_there": 0}
    _, differences = identify(report.settings, report.selection.sources, models.fingerprints() if models else {}, earlier)
    if differences:
        raise refuse_other_run(report.output, differences)
    kept = read_results(report.output, report.settings.retry_failed, lambda _: None, lambda _: None)
    line = f"{report.output} holds {kept.num_answers} answers and {kept.num_errors} failed records: they would be kept"
    return [line], {"output": str(report.output), "answers_there": kept.num_answers}


def _count_tokens(report: RunReport, maker: RequestMaker) -> tuple[TokenCounts, Request | None]:
    """Counts the first records, and gives the first request."""
    records = itertools.islice(report.reader.records(), NUM_COUNTED_RECORDS)
    good = [record for record in records if isinstance(record, PromptRecord)]
    prepared = [maker.prepare(record) for record in good]
    requests = [item for item in prepared if not isinstance(item, RecordError)]
    lengths = [len(request.prompt_ids) for request in requests]
    share = sum(lengths) / len(good) if good else 0.0
    expected = round(share * report.scan.num_good) if report.scan.is_complete else None
    counts = TokenCounts(len(requests), len(prepared) - len(requests), sum(lengths), max(lengths, default=0), expected)
    return counts, requests[0] if requests else None


def _text_of(tokenizer: PromptTokenizer, request: Request | None) -> str | None:
    return None if request is None else tokenizer.decode_prompt(request.prompt_ids)


def _show_prompt(tokenizer: PromptTokenizer, request: Request | None) -> Sequence[str]:
    text = _text_of(tokenizer, request)
    if request is None or text is None:
        return ()
    shown = text[:MAX_SHOWN_CHARACTERS] + (" ..." if len(text) > MAX_SHOWN_CHARACTERS else "")
    return (f"first prompt, {len(request.prompt_ids)} tokens:", *(f"    {line}" for line in shown.split("\n")))


def _describe_draft(models: FoundModels) -> Sequence[str]:
    fit = models.draft_fit
    if fit is None:
        return ("no draft: plain decoding",)
    return (f"the draft fits the target: {fit.config.algorithm}, {fit.token_map_source}", *fit.warnings)


def estimate_memory(models: FoundModels, settings: GenerateSettings) -> MemoryEstimate:
    """From configs and tensor headers, which are held against each other here. Raises ModelError when they do not fit."""
    config, context_length = models.target_config, models.context_length(settings)
    dtype = run_dtype(settings)
    headers = {} if settings.load_format == "dummy" else read_tensor_headers(models.target_path)
    own_head = HEAD_NAME in headers or not config.tie_word_embeddings
    target = TargetModel(config, dtype, "meta", context_length, own_head)
    if headers:
        check_headers(target.checkpoint_views(), headers, str(models.target_path))
    weights = _num_values(view for view in target.checkpoint_views().values())
    draft, draft_weights = None, 0
    if models.draft_fit is not None:
        draft = shape_only_model(models.draft_fit.config)
        draft_weights = sum(
            int(np.prod(shape)) for name, shape in models.draft_fit.description.shapes.items() if name not in ("d2t", "t2d")
        )
    tokens = settings.max_total_tokens or wanted_cache_tokens(settings, plan_of(settings), context_length)
    cache = tokens * cache_bytes_per_token(dtype, config, draft)
    return MemoryEstimate(weights * dtype.itemsize, draft_weights * dtype.itemsize, cache, tokens)


def _num_values(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)
