"""The batch engine: requests in, completions out, one iteration of EAGLE for all running rows at a time."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from eaglecli.engine.attention_backend import AttentionBackend, choose_attention
from eaglecli.engine.draft import RootOnlyDrafter
from eaglecli.engine.graph_capture import CapturePlan, capture_all, find_capturable_size
from eaglecli.engine.graph_runner import CaptureReport, GraphRunner, StaticTensors
from eaglecli.engine.graph_sizes import graph_lengths, padded_size
from eaglecli.engine.iteration import named_tensors
from eaglecli.engine.logit_adjustments import allocate_adjustments
from eaglecli.engine.logprob_buffers import LogprobBuffers
from eaglecli.engine.measure_costs import MeasuredRows, measure_costs
from eaglecli.engine.modes import Mode, ModeParts, allocate_backlog, build_modes, capture_plans, describe_modes, eagle_drafter
from eaglecli.engine.outlook import OUTLOOK_INTERVAL_S, Outlook
from eaglecli.engine.outputs import OutputBuffers
from eaglecli.engine.pages import PagePool
from eaglecli.engine.prefill import PrefillStage
from eaglecli.engine.prefill_check import PrefillCheck, PrefillParts, check_prefill
from eaglecli.engine.prefill_sizes import PrefillSize, most_graph_tokens, prefill_graph_sizes
from eaglecli.engine.readback import Readback, StepRows, emitted_of, ended, host_record, status_of
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.engine.request_limits import RequestLimits
from eaglecli.engine.row_state import HostHints, allocate_row_state, write_admitted, write_growths
from eaglecli.engine.scheduler import Scheduler
from eaglecli.engine.sequence import PrefillChunk, Sequence
from eaglecli.engine.settings import EngineSettings, check_windows
from eaglecli.engine.speculation_policy import FixedPolicy, SpeculationPolicy, StepObservation
from eaglecli.engine.stage_check import CheckedParts, StageCheck, check_stages
from eaglecli.engine.stage_clock import StageClock
from eaglecli.engine.stop_watches import StopWatches
from eaglecli.engine.token_choice import logprob_width
from eaglecli.kernels.commit_run import Status
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.target import TargetModel


@dataclass
class EngineCounts:
    """What the engine did, for the statistics."""

    num_iterations: int = 0
    num_prefill_tokens: int = 0  # recomputed ones included
    num_recomputed_tokens: int = 0  # of preempted requests
    num_output_tokens: int = 0
    num_row_steps: int = 0
    num_wasted_row_steps: int = 0  # rows run once more because the host had not yet seen that they had ended


def allocate_kv_cache(
    num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[num_layers, 2, num_slots, nkv, hd], uninitialised: whatever is read was written before, or is masked."""
    return torch.empty(num_layers, 2, num_slots, num_kv_heads, head_dim, dtype=dtype, device=device)


class Engine:
    """Runs requests through a target and an optional draft. Not safe for use from several threads.

    The text of a request depends on its prompt, its settings and its seed alone: not on the draft, the batch, the order,
    the page or the chunk size (in float32, up to near-ties of the target's logits).
    """

    def __init__(
        self, target: TargetModel, draft: DraftModel | None, settings: EngineSettings, attention: AttentionBackend | None = None
    ) -> None:
        """`attention` None is the fastest backend of the target's device. Raises UserError for settings that cannot be."""
        self.settings = settings
        self.counts = EngineCounts()
        self.policy: SpeculationPolicy = FixedPolicy()
        self._graph_lengths = graph_lengths(settings.context_length)
        self.outlook = Outlook()  # any thread may read it
        device, dtype = target.embed_weight.device, target.dtype
        if not any(speculation.num_steps for speculation in settings.all_speculation):
            draft = None
        self.device, self.dtype, self.vocab_size = device, dtype, target.config.vocab_size
        self.refusal = RequestLimits(settings, self.vocab_size).refusal  # why a request can never run, or None
        self.attention = choose_attention(attention, device, settings.is_deterministic)
        if settings.is_deterministic and not all(model.kernels.is_row_invariant for model in (target, draft) if model is not None):
            raise ValueError("deterministic inference needs models that use row-invariant kernels: see models/kernel_choice.py")
        for speculation in settings.all_speculation:
            check_windows("target", target.config.windows, speculation)
            check_windows("draft", draft.config.windows if draft else (), speculation)
        self._pool = PagePool(settings.num_pages, settings.page_size)
        self._scheduler = Scheduler(self._pool, settings, self.group_size(settings.max_running_requests))
        adjustments = allocate_adjustments(settings, self.vocab_size, device)
        functions = self.attention.attend, self.attention.attend_qkv
        self._state = allocate_row_state(settings, draft.hidden_size if draft else 0, dtype, device, *functions, adjustments)
        num_slots = self._pool.num_slots
        num_boundaries = len(draft.tap_boundaries) if draft else 0
        feature_size = target.config.layer.hidden_size * max(num_boundaries, 1)
        layer = target.config.layer
        self._kv_cache = allocate_kv_cache(target.config.num_layers, num_slots, layer.num_kv_heads, layer.head_dim, dtype, device)
        draft_cache = None
        self._caches = {"the target's cache": self._kv_cache}
        if draft is not None:
            draft_cache = allocate_kv_cache(draft.num_layers, num_slots, draft.num_kv_heads, draft.head_dim, dtype, device)
            self._caches["the draft's cache"] = draft_cache
        run_width, logprob_columns = settings.run_width, logprob_width(settings.max_logprobs, settings.run_width)
        parts = ModeParts(target, self._kv_cache, draft, draft_cache, self._state, settings, feature_size, logprob_columns)
        self._backlog = allocate_backlog(parts)
        shared = self._caches | named_tensors("state", self._state)
        if self._backlog is not None:
            shared |= {"the backlog's features": self._backlog.features, "the backlog's tokens": self._backlog.tokens}
        self._modes = build_modes(parts, self._backlog, shared)
        self._eagle = eagle_drafter(self._modes)
        self._mode_number = -1
        self._change_mode(0)
        drafter = self._eagle or RootOnlyDrafter(self._state)
        graph_sizes = _prefill_sizes(target, settings)
        self._prefill = PrefillStage(target, self._kv_cache, drafter, self._state, settings, graph_sizes, logprob_columns)
        self._prefill_static = StaticTensors(shared | self._prefill.buffers)
        self._prefill_runner = GraphRunner(self._prefill, self._prefill_static)
        self.lacks_prefill_graphs = False
        self._readback = Readback(settings.max_running_requests, run_width, device, logprob_columns)
        self._last_read_s: float | None = None  # when the record before was read, if nothing but it was run since
        self._outputs = OutputBuffers(settings.max_running_requests, settings.context_length, run_width)
        self._logprobs = LogprobBuffers(settings.max_running_requests, settings.max_logprobs)
        num_rows = settings.max_running_requests
        self._watches = StopWatches(num_rows)
        self._sequences: list[Sequence | None] = [None] * num_rows
        self._owner = np.zeros(num_rows, np.int64)  # generation of each row: grows whenever the row is given back
        self._in_flight = np.zeros(num_rows, np.int64)  # forwards enqueued and not yet read; each emits at least one token
        self._prompt_lens = np.zeros(num_rows, np.int64)
        self._caps = np.zeros(num_rows, np.int64)
        self._is_sampled = np.zeros(num_rows, bool)
        self._is_filtered = np.zeros(num_rows, bool)
        self._is_adjusted = np.zeros(num_rows, bool)
        self._running = np.zeros(0, np.int64)  # rows whose prompt is done
        self._num_added = 0
        self._num_iterations_of = np.zeros(num_rows + 1, np.int64)  # by number of requests that ran
        self._accepted_of = np.zeros((2, num_rows + 1), np.int64)  # row-steps and accepted drafts, likewise

    @property
    def is_idle(self) -> bool:
        """Nothing waits, nothing runs."""
        return self._scheduler.is_idle

    def group_size(self, batch_size: int) -> int:
        """Requests that are admitted together while others run, where at most `batch_size` do: on a GPU they share a prefill."""
        return self.settings.scheduling.group_size(batch_size) if self.device.type == "cuda" else 1

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError with the reason when it can never run: see `refusal`."""
        reason = self.refusal(request)
        if reason:
            raise ValueError(reason)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        self._scheduler.add(Sequence(request))
        self._num_added += 1

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Run requests, taken from the iterator as rows come free; yields completions as they finish.

        A request that can never run comes back with finish reason "error" and does not hold up the others.
        """
        source = iter(requests)
        while True:
            exhausted = False  # a source may have nothing for the moment and more later (a pipe, a follow-up turn)
            while not exhausted and len(self._scheduler.waiting) < self.settings.scheduling.window:
                request = next(source, None)
                exhausted = request is None
                if request is not None:
                    reason = self.refusal(request)
                    if reason:
                        yield Completion(request, np.zeros(0, np.int32), "error", error=reason)
                    else:
                        self._queue(request)
            if self.is_idle:
                return
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One iteration: schedule, prefill, draft, verify, accept and commit, extend. Returns what the iteration before finished."""
        completions = self._make_room()
        if self._readback.is_empty:
            self._last_read_s = perf_counter()  # what this iteration is measured from
        chunks, caught_up, length_class = self._schedule(), False, 0
        asked = self._what_is_asked()
        records = [self._run_prefill(chunks, asked)] if chunks else []
        prefilled = np.array([chunk.sequence.row for chunk in chunks if chunk.chooses_token], np.int64)
        self._in_flight[prefilled] += 1
        decoded = self._rows_to_decode()
        if len(decoded):
            hints = HostHints(self._max_length(decoded), *asked)
            length_class = bisect_left(self._graph_lengths, hints.max_length)
            self._change_mode(self.policy.choose(len(decoded), length_class))
            size = self._size_of(len(decoded))
            caught_up = self._catch_up(decoded, hints)
            self._iteration.load_rows(decoded, size)
            self._static.check()
            for stage in self._runners:
                stage.run(size, hints)
            run = self._iteration.buffers.run
            records.append(host_record(run.record, run.logprobs, len(decoded), hints.any_logprobs))
            self._in_flight[decoded] += 1
            self.counts.num_iterations += 1
            self._mode.num_iterations += 1
            self._num_iterations_of[len(decoded)] += 1
        if (chunks or caught_up) and not self._readback.is_empty:
            self._last_read_s = None  # the host has been busy with them: the iteration in flight is read later than it was done
        if records:
            owners = self._owner[prefilled], self._owner[decoded]
            step = StepRows(prefilled, decoded, *owners, self._mode_number, bool(chunks), caught_up, length_class)
            self._readback.put(step, records)
        completions += self._collect(keep=1 if len(decoded) and not self.attention.needs_host_lengths else 0)
        if perf_counter() - self.outlook.made_s > OUTLOOK_INTERVAL_S:
            self.outlook = self._make_outlook()
        return completions

    @property
    def waited_s(self) -> float:
        """Seconds that the host has spent waiting for the device; the rest of the time in `step` is its own work."""
        return self._readback.waited_s

    def wait_for_device(self) -> None:
        """Until all that was launched is done: an idle engine may have left an iteration behind, of rows that had ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure_stages(self, clock: StageClock | None) -> None:
        """Let `clock` measure the prefill and every stage from here on; None ends it."""
        for runner in self._all_runners:
            runner.clock = clock

    @property
    def modes(self) -> list[Mode]:
        """The ways to speculate, in the order of `EngineSettings.all_speculation`."""
        return self._modes

    @property
    def can_capture(self) -> bool:
        """Whether iterations can run as graphs: they are made for any length, which not every attention backend can use."""
        return self._state.lengths.is_cuda and not self.attention.needs_host_lengths

    def capture(self) -> Iterator[CaptureReport]:
        """Capture all stages at all graph sizes; yields a report as each is done. Only when `can_capture` and idle. Raises CaptureError."""
        lengths = (self.settings.context_length,)
        prefill = CapturePlan(self._prefill.load_padding, [self._prefill_runner], self._prefill.graph_sizes, lengths)
        return capture_all([capture_plans(self._modes, self.settings), [prefill]], self.widest_hints)

    def run_prefills_eagerly(self) -> None:
        """Drop the graphs of prefills, which pad and take memory: without them prefills run just as well, only launched one by one."""
        self._prefill_runner.drop_graphs()
        self._prefill.graph_sizes = ()
        self.lacks_prefill_graphs = True

    @property
    def _all_runners(self) -> list[GraphRunner]:
        return [self._prefill_runner, *(runner for mode in self._modes for runner in mode.runners)]

    def find_capturable_size(self, below: int) -> int | None:
        """The largest graph size under `below` that the memory is enough for, all graphs dropped; None when there is none."""
        sizes = [size for size in self.settings.graph_sizes if size < below]
        return find_capturable_size(capture_plans(self._modes, self.settings), sizes, self.widest_hints)

    @torch.inference_mode()
    def measure_costs(self, budget_s: float = 2.0) -> dict[tuple[int, int], float]:
        """Seconds of an iteration by (mode, batch size): see `measure_costs`. Only when idle; graphs should be captured before."""
        if self._backlog is not None and self._eagle is not None:
            self._backlog.warm_up(self._eagle.catch_up, self.settings.chunked_prefill_size, self.widest_hints)
        sizes, most = self.settings.graph_sizes, self.settings.max_running_requests
        rows = MeasuredRows(self._state, self._caches.values(), self.settings)
        try:
            graph_sizes = sizes if self.settings.pads_to_graph_sizes else ()
            return measure_costs(self._modes, rows, graph_sizes, most, self.widest_hints, budget_s)
        finally:
            rows.restore()

    @property
    def widest_hints(self) -> HostHints:
        """Bounds that hold for every batch: what graphs are made for, but for shorter rows some."""
        gives_logprobs = self.settings.max_logprobs is not None
        return HostHints(self.settings.context_length, True, True, self.settings.adjusts_logits, gives_logprobs)

    def check_stages(self, num_requests: int, seed: int, mode_number: int = 0) -> StageCheck:
        """Run `num_requests` random rows of one mode in all the ways that must agree: see `stage_check`.

        Only when idle; the rows stay as they were.
        """
        mode = self._modes[mode_number]
        caches = {"the target's cache": self._kv_cache} if mode.leaves_draft_behind else self._caches
        parts = CheckedParts(mode.iteration, mode.runners, self._state, caches, self.settings, mode.speculation, self.widest_hints)
        return check_stages(parts, num_requests, self._size_of(num_requests), seed)

    @property
    def prefill_sizes(self) -> tuple[PrefillSize, ...]:
        """What prefills are padded to, and captured at."""
        return self._prefill.graph_sizes

    def check_prefill(self, size: PrefillSize, seed: int) -> PrefillCheck:
        """Run random chunks of one of `prefill_sizes` in all the ways that must agree: see `prefill_check`. Only when idle."""
        context_length = self.settings.context_length
        parts = PrefillParts(
            self._prefill, self._prefill_runner, self._state, self._caches, context_length, self.vocab_size, self.widest_hints
        )
        return check_prefill(parts, size, seed)

    def summary(self) -> dict[str, Any]:
        """Counts of the whole run, which of its stages ran as graphs, and the books of the page pool."""
        ran = self._num_iterations_of
        runners = [runner for mode in self._modes for runner in mode.runners]
        num_graph_runs = sum(runner.num_graph_runs for runner in runners)
        num_runs = num_graph_runs + sum(runner.num_eager_runs for runner in runners)
        stages = {
            runner.stage.name: {"graph_runs": runner.num_graph_runs, "eager_runs": runner.num_eager_runs} for runner in self._all_runners
        }
        return {
            **vars(self.counts),
            "num_preemptions": self._scheduler.num_preemptions,
            "mean_running_requests": float(np.average(np.arange(len(ran)), weights=ran)) if ran.any() else None,
            "num_pages": self._pool.num_pages,
            "num_free_pages": self._pool.num_free,
            "page_size": self._pool.page_size,
            "attention_backend": self.attention.name,
            "graph_sizes": list(runners[0].captured_sizes),
            "graph_hit_rate": num_graph_runs / num_runs if num_runs else None,
            "stages": stages,
            "iterations_by_requests": {str(size): int(count) for size, count in enumerate(ran) if count},
            "accepted_by_requests": {
                str(size): {"row_steps": steps, "accepted_drafts": accepted}
                for size, (steps, accepted) in enumerate(self._accepted_of.T.tolist())
                if steps
            },
            **({"speculation": describe_modes(self._modes, self.policy)} if len(self._modes) > 1 else {}),
        }

    def check(self) -> None:
        """Prove the invariants of pages, rows and slots. Reads the device: for tests. Raises AssertionError."""
        self._scheduler.check()
        for sequence in self._scheduler.prefilling + self._scheduler.running:
            self._state.owned_slots(sequence, self._pool)
        assert not self._state.slot_table[self._state.dummy_row].any(), "the dummy row owns a slot"

    def _make_room(self) -> list[Completion]:
        """Pages for all that the next iteration may write. When they run out, what is in flight is read first, then the youngest goes."""
        completions: list[Completion] = []
        growths = self._scheduler.grow(*self._outgrown())
        if growths is None:
            completions = self._collect(keep=0)  # rows that have ended give pages back, and all outputs are known to their ends
            while (growths := self._scheduler.grow(*self._outgrown())) is None:
                self._preempt(self._scheduler.youngest())
        if growths:
            write_growths(self._state, growths, self.settings.page_size)
        return completions

    def _outgrown(self) -> tuple[list[Sequence], list[int]]:
        """Sequences whose pages may not be enough for the next iteration, and the tokens that it may come to.

        If there are any, those that will soon be short are among them: however many rows grow, it costs the host one copy.
        """
        rows = self._rows_to_decode()
        known = self._prompt_lens[rows] + self._outputs.num_tokens[rows] + self._in_flight[rows] * self.settings.run_width
        most = np.minimum(known, self._prompt_lens[rows] + self._caps[rows]) + self.settings.lookahead
        spare = self._scheduler.capacity[rows] - most
        grows = spare < (self.settings.scheduling.growth_tokens // 2 if (spare < 0).any() else 0)
        return [self._sequence(row) for row in rows[grows]], most[grows].tolist()

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's row away. Nothing of it is in flight but a part of its prompt: what follows on the device comes later."""
        row = sequence.row
        self._leave([row])
        self._scheduler.preempt(sequence, self._outputs.take_out(row))

    def _schedule(self) -> list[PrefillChunk]:
        """Admit what fits and cut this step's prompt chunks."""
        admitted = self._scheduler.admit(self._outputs.num_tokens)
        if admitted:
            rows = np.array([sequence.row for sequence in admitted])
            self._outputs.begin(rows)
            for sequence in admitted:
                self._sequences[sequence.row] = sequence
                self._watches.begin(sequence.row, sequence.request)
                if sequence.is_resumed:
                    self._outputs.put_in(sequence.row, sequence.emitted)
            self._in_flight[rows] = 0
            if self._backlog is not None:
                self._backlog.forget(rows)
            self._prompt_lens[rows] = [sequence.prompt_len for sequence in admitted]
            samplings = [sequence.request.sampling for sequence in admitted]
            self._caps[rows] = [sampling.max_new_tokens for sampling in samplings]
            self._is_sampled[rows] = [sampling.temperature > 0 for sampling in samplings]
            self._is_filtered[rows] = [sampling.temperature > 0 and _filters(sampling) for sampling in samplings]
            self._is_adjusted[rows] = [sampling.adjusts_logits for sampling in samplings]
            self._logprobs.begin(rows, [sequence.request for sequence in admitted])
            write_admitted(self._state, admitted, self.settings.page_size)
        chunks = sorted(self._scheduler.next_chunks(), key=lambda chunk: not chunk.chooses_token)
        started = [chunk.sequence.row for chunk in chunks if chunk.is_last]
        if started:
            self._running = np.append(self._running, started)
        self.counts.num_prefill_tokens += sum(chunk.end - chunk.start for chunk in chunks)
        self.counts.num_recomputed_tokens += sum(chunk.end - chunk.start for chunk in chunks if chunk.sequence.was_preempted)
        return chunks

    def _run_prefill(self, chunks: list[PrefillChunk], asked: tuple[bool, bool, bool, bool]) -> torch.Tensor:
        """Run the chunks; the record of those that choose a token, which come first."""
        size = self._prefill.size_of(chunks)
        self._prefill.load(chunks, size)
        self._prefill_static.check()
        hints = HostHints(max(chunk.end for chunk in chunks), *asked)
        self._prefill_runner.run(size, hints)
        return self._prefill.host_record(sum(chunk.chooses_token for chunk in chunks), hints.any_logprobs)

    def _size_of(self, num_requests: int) -> int:
        """Rows that a batch runs as, padding included."""
        return padded_size(num_requests, self.settings.graph_sizes) if self.settings.pads_to_graph_sizes else num_requests

    def _change_mode(self, number: int) -> None:
        """Run iterations of this mode from now on. Nothing happens on the device."""
        if number != self._mode_number:
            self._mode_number, self._mode = number, self._modes[number]
            self._iteration, self._runners, self._static = self._mode.iteration, self._mode.runners, self._mode.static

    def _catch_up(self, rows: np.ndarray, hints: HostHints) -> bool:
        """Bring the draft's cache to where `rows` stand before an iteration that drafts; whether it had to be."""
        if self._backlog is None or self._eagle is None:
            return False
        if self._mode.leaves_draft_behind:
            self._backlog.count(rows)
            return False
        groups = 0
        for group in self._backlog.groups_behind(rows, self.settings.chunked_prefill_size):
            self._eagle.catch_up(self._backlog, group, hints)
            groups += 1
        return groups > 0

    def _rows_to_decode(self) -> np.ndarray:
        """int64: running rows, less those that are certain to have reached their cap by what is in flight."""
        rows = self._running
        return rows[self._outputs.num_tokens[rows] + self._in_flight[rows] < self._caps[rows]]

    def _what_is_asked(self) -> tuple[bool, bool, bool, bool]:
        """Whether any row samples, filters, adjusts its logits, wants log-probabilities: the flags of `HostHints`."""
        flags = (bool(rows.any()) for rows in (self._is_sampled, self._is_filtered, self._is_adjusted))
        return *flags, self._logprobs.any_wanted  # type: ignore[return-value]

    def _max_length(self, rows: np.ndarray) -> int:
        """No row has more committed tokens when the iteration to come begins."""
        known = self._prompt_lens[rows] + self._outputs.num_tokens[rows] + self._in_flight[rows] * self.settings.run_width
        return int(np.minimum(known, self._prompt_lens[rows] + self._caps[rows]).max())

    def _collect(self, keep: int) -> list[Completion]:
        """Take the records of all iterations but the last `keep`."""
        completions: list[Completion] = []
        while (result := self._readback.take(keep)) is not None:
            rows = result.rows
            num_prefilled = len(rows.prefilled)
            first, later = result.split(num_prefilled)
            self._observe(rows, result.record[num_prefilled:])
            if num_prefilled:
                completions += self._take_record(rows.prefilled, rows.prefilled_owner, *first, None)
            num_proposed = self._modes[rows.mode].speculation.num_draft_tokens - 1
            completions += self._take_record(rows.decoded, rows.decoded_owner, *later, num_proposed)
        return completions

    def _observe(self, step: StepRows, record: np.ndarray) -> None:
        """Tell the policy of an iteration whose record, int32 [B, W + 3], has just come."""
        now, before = perf_counter(), self._last_read_s
        self._last_read_s = None if self._readback.is_empty else now
        if not len(record):
            return
        current = record[self._owner[step.decoded] == step.decoded_owner]
        num_tokens = int(emitted_of(current).sum())
        num_accepted, mode = int(current[:, -3].sum()), self._modes[step.mode]
        mode.num_tokens += num_tokens
        mode.num_row_steps += len(current)
        mode.num_accepted_drafts += num_accepted
        self._accepted_of[:, len(record)] += len(current), num_accepted
        seconds = None if before is None or step.has_prefill else now - before
        going_on = current[status_of(current) == Status.RUNNING]
        accept_counts, length_class = going_on[:, -3], step.length_class
        self.policy.observe(StepObservation(step.mode, len(record), accept_counts, num_tokens, seconds, step.caught_up, length_class))

    def _take_record(
        self, rows: np.ndarray, owner: np.ndarray, record: np.ndarray, logprobs: np.ndarray, num_proposed: int | None
    ) -> list[Completion]:
        """Append one record to the outputs, and finish the requests that ended in it. `num_proposed` drafts a row; None: no verify."""
        current = self._owner[rows] == owner
        if num_proposed is not None:
            self.counts.num_row_steps += len(rows)
            self.counts.num_wasted_row_steps += int((~current).sum())
        rows, record = rows[current], record[current]
        self._in_flight[rows] -= 1
        self._outputs.add(rows, record, num_proposed)
        if self._logprobs.any_wanted:
            self._logprobs.add(rows, logprobs[current], emitted_of(record))
        if num_proposed is None:
            now = perf_counter()
            for row in rows.tolist():
                self._sequence(row).first_token_s = now
        stop_strings = self._watches.cut(rows, status_of(record), self._outputs)
        self.counts.num_output_tokens = self._outputs.num_added
        ends = sorted({*ended(record).tolist(), *stop_strings})
        ended_rows, statuses = rows[ends].tolist(), status_of(record)[ends].tolist()
        completions = [
            self._finish(row, Status(status), stop_strings.get(i)) for i, row, status in zip(ends, ended_rows, statuses, strict=True)
        ]
        self._leave(ended_rows)
        return completions

    def _finish(self, row: int, status: Status, stop_string: str | None) -> Completion:
        sequence = self._sequence(row)
        times = {
            "queue_s": sequence.admitted_s - sequence.added_s,
            "ttft_s": sequence.first_token_s - sequence.added_s,
            "e2e_s": perf_counter() - sequence.added_s,
        }
        completion = self._outputs.completion(row, sequence.request, status, stop_string, times)
        logprobs = self._logprobs.take(sequence.request, len(completion.output_ids))
        completion = completion if logprobs is None else replace(completion, logprobs=logprobs)
        self._scheduler.lengths.observe(len(completion.output_ids), completion.finish_reason == "stop")
        self._scheduler.release(sequence)
        return completion

    def _leave(self, rows: list[int]) -> None:
        """The rows are nobody's: what is in flight for them is not looked at."""
        if not rows:
            return
        for row in rows:
            self._sequences[row] = None
            self._watches.end(row)
        self._owner[rows] += 1
        self._is_sampled[rows] = self._is_filtered[rows] = self._is_adjusted[rows] = False
        is_left = np.zeros(len(self._owner), bool)
        is_left[rows] = True
        self._running = self._running[~is_left[self._running]]

    def _make_outlook(self) -> Outlook:
        return Outlook(
            num_requests=self._num_added,
            num_iterations=self.counts.num_iterations,
            num_row_steps=self.counts.num_row_steps,
            num_prefill_tokens=self.counts.num_prefill_tokens,
            num_output_tokens=self.counts.num_output_tokens,
            forecast=self._scheduler.forecast(self._outputs.num_tokens),
            made_s=perf_counter(),
        )

    def _sequence(self, row: int) -> Sequence:
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} is nobody's"
        return sequence


def _prefill_sizes(target: TargetModel, settings: EngineSettings) -> tuple[PrefillSize, ...]:
    """What prefills are padded to, where batches are padded at all."""
    if not (settings.graph_sizes and settings.pads_to_graph_sizes):
        return ()
    num_parameters = sum(parameter.numel() for parameter in target.layers.parameters())
    most_tokens = most_graph_tokens(num_parameters, target.dtype.itemsize, settings.chunked_prefill_size)
    return prefill_graph_sizes(most_tokens, settings.max_running_requests)


def _filters(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
