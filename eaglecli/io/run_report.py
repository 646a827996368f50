"""stats.json and manifest.json: what a run was told, what it did, and how each number is defined."""

import datetime
import importlib.metadata
import platform
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import eaglecli
from eaglecli.config import GenerateSettings
from eaglecli.errors import ExitCode
from eaglecli.io.accept_statistics import DEFINITIONS, AcceptTotals
from eaglecli.io.prompts import InputSelection
from eaglecli.io.records import RecordError
from eaglecli.io.result_lines import Answer
from eaglecli.io.run_identity import RunIdentity
from eaglecli.io.scan import InputReader, InputScan

SCHEMA_VERSION = 1
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "huggingface_hub", "numpy", "gguf")
PERCENTILES = (50, 90, 99)
THROUGHPUT_DEFINITIONS = {
    "request_throughput": "answers per second of total_latency",
    "input_throughput": "prompt tokens per second of total_latency",
    "output_throughput": "delivered tokens per second of total_latency",
    "total_throughput": "prompt and delivered tokens per second of total_latency",
    "total_latency": "seconds from the first request to the last result; loading is not in it",
    "throughput": "all rates are of the last session alone, when a run was taken up again",
}


def find_versions() -> dict[str, str | None]:
    """Versions of everything whose change may change text."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


@dataclass
class Session:
    """What one process did of a run: rates are of it alone, all other counts are of the run."""

    num_answers: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0


@dataclass
class RunReport:
    """What is counted while a run goes on. Times of answers take 24 bytes each."""

    command_line: list[str]
    settings: GenerateSettings
    reader: InputReader
    output: Path
    started_at: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    models: tuple[str, ...] = ()  # what was loaded, in sentences
    load_s: float = 0.0
    generate_s: float = 0.0
    identity: RunIdentity | None = None  # None until the input was looked at
    versions: Mapping[str, str | None] = field(default_factory=find_versions)
    earlier_sessions: list[Mapping[str, Any]] = field(default_factory=list)
    session: Session = field(default_factory=Session)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    error_codes: dict[str, int] = field(default_factory=dict)
    num_skipped: int = 0  # left out by --too-long skip
    num_failed_samples: int = 0  # errors of one sample alone
    half_failed: set[int] = field(default_factory=set)  # indexes of their records
    times_s: dict[str, "array[float]"] = field(default_factory=lambda: {name: array("d") for name in ("queue_s", "ttft_s", "e2e_s")})

    def count_answer(self, answer: Answer) -> None:
        """Counts one good record."""
        self._count(answer.num_prompt_tokens, len(answer.token_ids), answer.finish_reason, vars(answer))
        self.session.num_answers += 1
        self.session.num_input_tokens += answer.num_prompt_tokens
        self.session.num_output_tokens += len(answer.token_ids)

    def count_error(self, error: RecordError) -> None:
        """Counts one bad record."""
        self._count_code("skipped" if error.is_skipped else error.code, error.key.index, error.sample)

    def count_answer_line(self, line: Mapping[str, Any]) -> None:
        """Counts a line of generations.jsonl that an earlier session wrote."""
        usage = line["usage"]
        self._count(usage["prompt_tokens"], usage["completion_tokens"], line["finish_reason"], line["timing"])

    def count_error_line(self, line: Mapping[str, Any]) -> None:
        """Counts a line of errors.jsonl that an earlier session wrote."""
        self._count_code("skipped" if line.get("skipped") else line["code"], line["index"], line.get("sample"))

    def _count(self, num_input_tokens: int, num_output_tokens: int, finish_reason: str, times_s: Mapping[str, float]) -> None:
        self.num_input_tokens += num_input_tokens
        self.num_output_tokens += num_output_tokens
        self.finish_reasons[finish_reason] = self.finish_reasons.get(finish_reason, 0) + 1
        for name, times in self.times_s.items():
            times.append(times_s[name])

    def _count_code(self, code: str, index: int, sample: int | None) -> None:
        if code == "skipped":
            self.num_skipped += 1
            return
        self.error_codes[code] = self.error_codes.get(code, 0) + 1
        if sample is not None:
            self.num_failed_samples += 1
            self.half_failed.add(index)

    @property
    def selection(self) -> InputSelection:
        """What is read and how."""
        return self.reader.selection

    @property
    def scan(self) -> InputScan:
        """What is known of the input; of a stream, until now."""
        return self.reader.scan

    @property
    def num_done(self) -> int:
        """Answers so far."""
        return sum(self.finish_reasons.values())

    @property
    def num_failed(self) -> int:
        """Errors so far: of records, and of samples where only some failed."""
        return sum(self.error_codes.values())

    @property
    def num_failed_records(self) -> int:
        """Records with an error so far, however many of their samples failed."""
        return self.num_failed - self.num_failed_samples + len(self.half_failed)


def build_stats(report: RunReport, totals: AcceptTotals | None, engine_summary: dict[str, Any]) -> dict[str, Any]:
    """stats.json. `accept` is null with plain decoding."""
    return {
        "schema_version": SCHEMA_VERSION,
        "counts": {
            "records": report.scan.num_records,
            "successful_requests": report.num_done,
            "failed_requests": report.num_failed,
            "skipped_requests": report.num_skipped,
            "finish_reasons": report.finish_reasons,
            "error_codes": report.error_codes,
            "total_input_tokens": report.num_input_tokens,
            "total_output_tokens": report.num_output_tokens,
        },
        "accept": None if totals is None else totals.describe(),
        "throughput": _throughput(report),
        "timing": _timing(report),
        "engine": engine_summary,
        "definitions": {**DEFINITIONS, **THROUGHPUT_DEFINITIONS},
    }


def _throughput(report: RunReport) -> dict[str, float | None]:
    seconds = report.generate_s
    session = report.session
    counts = {
        "request_throughput": session.num_answers,
        "input_throughput": session.num_input_tokens,
        "output_throughput": session.num_output_tokens,
        "total_throughput": session.num_input_tokens + session.num_output_tokens,
    }
    return {**{name: count / seconds if seconds else None for name, count in counts.items()}, "total_latency": seconds}


def _timing(report: RunReport) -> dict[str, Any]:
    timing: dict[str, Any] = {"load_s": report.load_s, "generate_s": report.generate_s}
    for name, times in report.times_s.items():
        values = np.percentile(np.frombuffer(times), PERCENTILES) if len(times) else [None] * len(PERCENTILES)
        timing[name] = {f"p{rank}": None if value is None else float(value) for rank, value in zip(PERCENTILES, values, strict=True)}
    return timing


def build_manifest(report: RunReport, status: str, exit_code: ExitCode | None) -> dict[str, Any]:
    """manifest.json: enough to do the run again. `status`: running, complete, interrupted or failed."""
    selection, scan = report.selection, report.scan
    return {
        "schema_version": SCHEMA_VERSION,
        "eaglecli_version": eaglecli.__version__,
        "status": status,
        "exit_code": None if exit_code is None else int(exit_code),
        "started_at": report.started_at,
        "command_line": report.command_line,
        "sessions": [*report.earlier_sessions, _session(report, status, exit_code)],
        "identity": None if report.identity is None else report.identity.to_json(),
        "settings": report.settings.described(),
        "input": {
            "files": list(selection.sources),
            "formats": dict(scan.formats),
            "sha256": scan.sha256,
            "records": scan.num_records,
            "good": scan.num_good,
            "bad": scan.num_bad,
            "kinds": dict(scan.kinds),
        },
        "models": list(report.models),
        "versions": report.versions,
        "reproducibility": (
            "float32: the same input, settings and seed give the same text whatever batch, order, draft, page and chunk size,"
            " up to near-ties of the target's logits; lower precision: up to near-ties, which are more frequent"
        ),
    }


def _session(report: RunReport, status: str, exit_code: ExitCode | None) -> dict[str, Any]:
    return {
        "started_at": report.started_at,
        "command_line": report.command_line,
        "status": status,
        "exit_code": None if exit_code is None else int(exit_code),
        "answers": report.session.num_answers,
        "generate_s": report.generate_s,
    }
