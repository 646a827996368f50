# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""What the simplified preparation of the draft's extend is worth: SGLang's pull request 6987 as before and after, in one run.

    python -m benchmarks.extend_preparation                     smollm2 (random weights) and the 8B shape, batch 1
    python -m benchmarks.extend_preparation --target smollm2-135m --draft DRAFT --prompts prompts.jsonl

Three arms, which differ in nothing else; the product has no switch for them:
    a   padded with synchronisations: the host reads accept lengths, the running sum is a launch of its own and an argument,
        requests are copied one by one into lines of num_steps + 1; runs before the graph of the forward
    b   padded without synchronisations: the same lines filled by gathers, inside the graph
    c   the product's: packed, one launch, inside the graph
Then the preparation alone for 1 to 1,024 requests: the running sum inside the kernel against one that is given to it.
"""

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks.dummy_models import SHAPES, load_dummy_pair
from benchmarks.prompt_texts import load_reference_tokenizer, prompt_ids, read_records
from eaglecli.engine.engine import Engine
from eaglecli.engine.extend import prepare_extend_after_decode
from eaglecli.engine.forward_batch import CaptureHidden, DraftForwardBatch, ForwardMode
from eaglecli.engine.graph_runner import GraphRunner
from eaglecli.engine.iteration import Stage
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.row_state import Batch, HostHints
from eaglecli.engine.settings import EngineSettings, SpeculationSettings
from eaglecli.engine.verify import CommittedRun
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.create_extend_spec_info import create_extend_spec_info
from eaglecli.models.draft_loader import load_draft
from eaglecli.models.loader import load_target
from eaglecli.models.model_path import resolve_model_path
from tests.fixtures import write_random_draft

CONTEXT = 1024
PROMPT_LEN = 64
REQUEST_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, eq=False)
class PaddedInputs:
    """The draft's forward with S + 1 tokens for every row: static, so that a graph can read it. T = B * (S + 1)."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int32 [T]
    out_slots: torch.Tensor  # int32 [T]
    feature_index: torch.Tensor  # int64 [T]
    last_index: torch.Tensor  # int64 [B]
    query_start: torch.Tensor  # int32 [B + 1]
    proposal_positions: torch.Tensor  # int32 [B]

    @staticmethod
    def allocate(batch: int, width: int, device: torch.device) -> "PaddedInputs":
        """All tokens padding."""

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        start = torch.arange(batch + 1, dtype=torch.int32, device=device) * width
        tokens = batch * width
        return PaddedInputs(
            zeros(tokens, torch.int64),
            zeros(tokens, torch.int32),
            zeros(tokens, torch.int32),
            zeros(tokens, torch.int64),
            zeros(batch, torch.int64),
            start,
            zeros(batch, torch.int32),
        )


class Arm:
    """The extend stage of an engine, with a preparation of its own."""

    def __init__(self, engine: Engine, batch: int) -> None:
        self.engine, self.batch = engine, batch
        self.state, self.buffers = engine._state, engine._iteration.buffers
        self.num_nodes = engine.settings.speculation.num_draft_tokens
        self.width = engine.settings.speculation.num_steps + 1
        self.inputs = PaddedInputs.allocate(batch, self.width, self.state.lengths.device)

    def prepare(self, hints: HostHints) -> object:
        """Build the inputs of the draft's forward for the front of the buffers."""
        raise NotImplementedError

    def forward(self, size: int, hints: HostHints) -> None:
        """Run the draft on the padded inputs."""
        inputs, run, rows = self.inputs, self.run_of(), self.buffers.live_rows[:size]
        draft = self.engine._eagle._draft  # type: ignore[union-attr]
        attention = AttentionInputs(
            rows=rows,
            query_start=inputs.query_start,
            prefix_lens=run.base_lengths,
            slot_table=self.state.slot_table,
            out_slots=inputs.out_slots,
            positions=inputs.positions,
            tail_mask=None,
            max_query_len=self.width,
            max_prefix_len=hints.max_length,
            attend=self.state.attend,
            attend_qkv=self.state.attend_qkv,
        )
        forward = DraftForwardBatch(
            mode=ForwardMode.EXTEND,
            capture_hidden=CaptureHidden.LAST,
            input_ids=inputs.input_ids,
            hidden=draft.fuse(run.features.flatten(0, 1), inputs.feature_index),
            hidden_index=None,
            positions=inputs.positions,
            proposal_positions=inputs.proposal_positions,
            attention=attention,
            last_index=inputs.last_index,
        )
        self.engine._eagle._keep_last(Batch(rows, hints), forward)  # type: ignore[union-attr]

    def run_of(self) -> CommittedRun:
        """What the verify of this batch has left."""
        run = self.buffers.run
        return CommittedRun(**{name: getattr(run, name)[: self.batch] for name in run.__dataclass_fields__})

    def stage(self) -> Stage:
        """The stage to capture."""
        return Stage("extend", self.width, self.forward)


class PaddedWithSynchronisations(Arm):
    """Arm a."""

    def prepare(self, hints: HostHints) -> object:
        """Line by line, by what the host has read."""
        run, rows = self.run_of(), self.buffers.live_rows[: self.batch]
        lens = run.extend_lens.tolist()
        end = torch.cumsum(run.extend_lens, 0)
        total = int(end[-1].item())
        base = run.base_lengths.tolist()
        inputs, width = self.inputs, self.width
        assert total == sum(lens)
        for tensor in (inputs.input_ids, inputs.positions, inputs.out_slots, inputs.feature_index, inputs.last_index):
            tensor.zero_()
        for index, count in enumerate(lens):
            here = slice(index * width, index * width + count)
            tail = slice(base[index], base[index] + count)
            inputs.input_ids[here] = run.tokens[index, :count]
            inputs.positions[here] = torch.arange(tail.start, tail.stop, dtype=torch.int32, device=end.device)
            inputs.out_slots[here] = self.state.slot_table[rows[index : index + 1].long(), tail].flatten()
            inputs.feature_index[here] = run.path[index, :count] + index * self.num_nodes
            inputs.last_index[index : index + 1] = index * width + max(count - 1, 0)
            inputs.proposal_positions[index : index + 1] = base[index] + count + 1
        return total


class PaddedWithoutSynchronisations(Arm):
    """Arm b."""

    def prepare(self, hints: HostHints) -> object:
        """All lines at once, without the host."""
        run, rows, inputs = self.run_of(), self.buffers.live_rows[: self.batch], self.inputs
        step = torch.arange(self.width, device=rows.device)
        line = torch.arange(self.batch, device=rows.device)[:, None]
        is_real = step < run.extend_lens[:, None]
        column = run.base_lengths[:, None] + step
        slots = self.state.slot_table[rows[:, None], column.clamp(max=self.state.slot_table.shape[1] - 1)]
        inputs.input_ids.copy_(torch.where(is_real, run.tokens, 0).flatten())
        inputs.positions.copy_(torch.where(is_real, column, 0).flatten())
        inputs.out_slots.copy_(torch.where(is_real, slots, 0).flatten())
        inputs.feature_index.copy_(torch.where(is_real, run.path + line * self.num_nodes, 0).flatten())
        inputs.last_index.copy_((run.extend_lens - 1).clamp(min=0) + line[:, 0] * self.width)
        inputs.proposal_positions.copy_(run.base_lengths + run.extend_lens + 1)
        return None

    def stage(self) -> Stage:
        """Preparation and forward."""

        def run(size: int, hints: HostHints) -> None:
            self.prepare(hints)
            self.forward(size, hints)

        return Stage("extend", self.width, run)


class Simplified(Arm):
    """Arm c: nothing is replaced."""

    def prepare(self, hints: HostHints) -> object:
        """What the product's stage begins with."""
        draft = self.engine._eagle._draft  # type: ignore[union-attr]
        return prepare_extend_after_decode(
            draft, self.state, Batch(self.buffers.live_rows[: self.batch], hints), self.run_of(), self.num_nodes
        )

    def stage(self) -> Stage:
        """The product's."""
        return self.engine._iteration.stages[2]


class PreparedRunner(GraphRunner):
    """A runner that prepares eagerly before every run: what cannot be captured."""

    def __init__(self, arm: Arm, runner: GraphRunner) -> None:
        super().__init__(arm.stage(), runner._static)
        self.arm = arm

    def run(self, size: int, hints: HostHints) -> None:
        """Prepare, then run."""
        self.arm.prepare(hints)
        super().run(size, hints)


ARMS: dict[str, type[Arm]] = {"a": PaddedWithSynchronisations, "b": PaddedWithoutSynchronisations, "c": Simplified}


@dataclass(frozen=True, eq=False)
class Workload:
    """Models and prompts."""

    name: str
    target: torch.nn.Module
    draft: torch.nn.Module
    prompts: list[np.ndarray]
    cap: int


def open_arm(workload: Workload, kind: str, speculation: SpeculationSettings, batch: int) -> tuple[Engine, Arm]:
    """An engine whose extend stage is the arm's."""
    settings = EngineSettings(
        context_length=CONTEXT,
        max_total_tokens=batch * (CONTEXT + speculation.lookahead + 16),
        max_running_requests=batch,
        graph_sizes=(batch,),
        speculation=speculation,
    )
    engine = Engine(workload.target, workload.draft, settings)
    arm = ARMS[kind](engine, batch)
    runner = engine._runners[2]
    engine._runners[2] = PreparedRunner(arm, runner) if kind == "a" else GraphRunner(arm.stage(), runner._static)
    if engine.can_capture:
        for _ in engine.capture():
            pass
    return engine, arm


def run_arm(workload: Workload, kind: str, speculation: SpeculationSettings, batch: int, num_repeats: int) -> dict[str, float]:
    """token/s (best of the repeats), accept length, and what one iteration launches and waits for."""
    engine, arm = open_arm(workload, kind, speculation, batch)
    requests = [Request(key, prompt, SamplingParams(max_new_tokens=workload.cap)) for key, prompt in enumerate(workload.prompts)]
    list(engine.generate(requests[:batch]))
    best, steps, accepted = 0.0, 0, 0
    for _ in range(num_repeats):
        iterations = engine.counts.num_iterations
        started = perf_counter()
        done = list(engine.generate(requests))
        seconds = perf_counter() - started
        best = max(best, sum(len(completion.output_ids) for completion in done) / seconds)
        steps = sum(completion.num_verify_steps for completion in done)
        accepted = sum(completion.num_accepted_drafts for completion in done)
        iterations = engine.counts.num_iterations - iterations
    found = {"token/s": best, "accept length": (accepted + steps) / steps, "iteration ms": seconds / iterations * 1e3}
    return found | time_preparation(engine, arm, batch) | count_calls(engine, requests[:batch])


def time_preparation(engine: Engine, arm: Arm, batch: int) -> dict[str, float]:
    """Microseconds of the preparation alone, launched eagerly on what a run has left, with the wait that ends it."""
    device = arm.state.lengths.device
    arm.buffers.live_rows[:batch].copy_(torch.arange(batch, dtype=torch.int32, device=device))
    arm.buffers.run.extend_lens[:batch] = arm.width
    arm.buffers.run.base_lengths[:batch] = PROMPT_LEN
    arm.buffers.run.path[:batch] = torch.arange(arm.width, dtype=torch.int32, device=device)
    with torch.inference_mode():
        eager_us = _microseconds(lambda: arm.prepare(engine.widest_hints), 50)
        graph_us = float("nan")
        if engine.can_capture and not isinstance(arm, PaddedWithSynchronisations):
            graph_us = _graph_microseconds(lambda: arm.prepare(engine.widest_hints))
    return {"prepare eagerly us": eager_us, "prepare in graph us": graph_us}


def _microseconds(work: Callable[[], object], count: int) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(3):
        work()
    synchronize()
    started = perf_counter()
    for _ in range(count):
        work()
    synchronize()
    return (perf_counter() - started) / count * 1e6


def _graph_microseconds(work: Callable[[], object], copies: int = 20, replays: int = 20) -> float:
    """Of the device, for one `work` of many in a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / (copies * replays)


def count_calls(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    """CUDA calls of the host in one iteration of the steady loop."""
    if not engine.can_capture:
        return {}
    for request in requests:
        engine.add(request)
    for _ in range(6):
        engine.step()
    iterations = engine.counts.num_iterations
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            engine.step()
        torch.cuda.synchronize()
    count = engine.counts.num_iterations - iterations
    while not engine.is_idle:
        engine.step()
    calls: dict[str, float] = {"kernel launches": 0.0, "graph launches": 0.0, "copies": 0.0, "waits": 0.0}
    for event in profile.key_averages():
        name = event.key.lower()
        if not name.startswith("cu"):
            continue
        kind = "graph launches" if "graphlaunch" in name else "kernel launches" if "launchkernel" in name else ""
        kind = kind or ("copies" if "memcpy" in name or "memset" in name else "waits" if "synchronize" in name else "")
        if kind:
            calls[kind] += event.count / count
    return calls


# ---- the running sum: inside the kernel, or given ---------------------------------------------------------------------


@triton.jit
def _extend_info_given_sum_kernel(
    tokens_ptr, extend_lens_ptr, end_ptr, lengths_ptr, rows_ptr, slot_table_ptr, path_ptr,
    input_ids_ptr, positions_ptr, out_slots_ptr, feature_index_ptr, query_start_ptr, last_index_ptr,
    num_rows, num_columns, num_nodes, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    extend_len = tl.load(extend_lens_ptr + row)
    start = tl.load(end_ptr + row) - extend_len
    total = tl.load(end_ptr + num_rows - 1)
    length = tl.load(lengths_ptr + row)
    slot_row = tl.load(rows_ptr + row).to(tl.int64) * num_columns
    step = tl.arange(0, WIDTH_BLOCK)
    inside = step < WIDTH
    is_real = step < extend_len
    packed = tl.where(is_real, start + step, total + row * WIDTH - start + step - extend_len)
    token = tl.load(tokens_ptr + row * WIDTH + step, mask=is_real, other=0)
    slot = tl.load(slot_table_ptr + slot_row + length + step, mask=is_real & (length + step < num_columns), other=0)
    path_node = tl.load(path_ptr + row * WIDTH + step, mask=is_real, other=0)
    tl.store(input_ids_ptr + packed, token, mask=inside)
    tl.store(positions_ptr + packed, tl.where(is_real, length + step, 0), mask=inside)
    tl.store(out_slots_ptr + packed, slot, mask=inside)
    tl.store(feature_index_ptr + packed, tl.where(is_real, row * num_nodes + path_node, 0), mask=inside)
    tl.store(query_start_ptr + row, start)
    if row == num_rows - 1:
        tl.store(query_start_ptr + num_rows, total)
    tl.store(last_index_ptr + row, tl.where(extend_len > 0, start + extend_len - 1, 0))


@dataclass(frozen=True, eq=False)
class PreparationCase:
    """Inputs of `create_extend_spec_info` for many requests."""

    tokens: torch.Tensor
    extend_lens: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    slot_table: torch.Tensor
    path: torch.Tensor
    num_nodes: int

    @staticmethod
    def random(num_requests: int, width: int, device: torch.device) -> "PreparationCase":
        """Accepted runs of 1 to `width` tokens."""
        generator = torch.Generator(device).manual_seed(0)

        def integers(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.randint(0, high, shape, generator=generator, device=device, dtype=dtype)

        rows = torch.arange(num_requests, dtype=torch.int32, device=device)
        path = torch.arange(width, dtype=torch.int32, device=device).expand(num_requests, width).contiguous()
        return PreparationCase(
            integers(1000, num_requests, width, dtype=torch.int64),
            1 + integers(width, num_requests),
            integers(200, num_requests),
            rows,
            integers(10_000, num_requests, 256),
            path,
            width,
        )

    def with_sum_inside(self) -> tuple[torch.Tensor, ...]:
        """The product's kernel."""
        info = create_extend_spec_info(self.tokens, self.extend_lens, self.lengths, self.rows, self.slot_table, self.path, self.num_nodes)
        return info.input_ids, info.positions, info.out_slots, info.feature_index, info.query_start, info.last_index

    def with_sum_given(self) -> tuple[torch.Tensor, ...]:
        """A launch for the running sum, then a kernel that reads it."""
        end = torch.cumsum(self.extend_lens, 0, dtype=torch.int32)
        num_rows, width = self.tokens.shape

        def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=end.device)

        entries = num_rows * width
        out = (
            empty(entries, torch.int64),
            empty(entries, torch.int32),
            empty(entries, torch.int32),
            empty(entries, torch.int64),
            empty(num_rows + 1, torch.int32),
            empty(num_rows, torch.int64),
        )
        _extend_info_given_sum_kernel[(num_rows,)](
            self.tokens, self.extend_lens, end, self.lengths, self.rows, self.slot_table, self.path, *out,
            num_rows, self.slot_table.shape[1], self.num_nodes, WIDTH=width, WIDTH_BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
        return out


def compare_sums(width: int, device: torch.device) -> None:
    """Print the cost of one preparation by number of requests, after checking that both give the same."""
    print(f"\nrunning sum, runs of 1 to {width} tokens{'':9}inside us{'':4}given us  (in a graph)")
    for num_requests in REQUEST_COUNTS:
        case = PreparationCase.random(num_requests, width, device)
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(case.with_sum_inside(), case.with_sum_given(), strict=True))
        inside_us, given_us = _graph_microseconds(case.with_sum_inside), _graph_microseconds(case.with_sum_given)
        print(f"{num_requests:6} requests{'':24}{inside_us:9.2f}{given_us:12.2f}  {'equal' if same else 'DIFFERENT'}", flush=True)


# ---- the run ----------------------------------------------------------------------------------------------------------


def dummy_workload(shape: str, folder: Path, dtype: torch.dtype, device: torch.device, options: argparse.Namespace) -> Workload:
    """Random weights, random prompts."""
    pair = load_dummy_pair(shape, folder, dtype, device, CONTEXT)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, SHAPES[shape]["vocab_size"], PROMPT_LEN).astype(np.int32) for _ in range(options.num_prompts)]
    return Workload(shape, pair.target.model, pair.draft.model, prompts, options.max_new_tokens)


def real_workload(dtype: torch.dtype, device: torch.device, options: argparse.Namespace) -> Workload:
    """The models and prompts that were named."""
    path = resolve_model_path(options.target)
    target = load_target(path, dtype, device, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        draft_path = write_random_draft(target.config, Path(folder)) if options.draft == "random" else Path(options.draft)
        draft = load_draft(draft_path, target, dtype, device, CONTEXT)
    tokenizer = load_reference_tokenizer(path)
    prompts = [np.array(prompt_ids(tokenizer, record), np.int32) for record in read_records(options.prompts, options.num_prompts)]
    fitting = [prompt for prompt in prompts if len(prompt) + options.max_new_tokens <= CONTEXT]
    return Workload(options.target, target.model, draft.model, fitting, options.max_new_tokens)


def compare_arms(workload: Workload, speculation: SpeculationSettings, options: argparse.Namespace) -> None:
    """Print the three arms side by side."""
    found: dict[str, dict[str, float]] = {}
    for kind in ARMS:
        started = perf_counter()
        try:
            found[kind] = run_arm(workload, kind, speculation, options.batch, options.repeats)
        except Exception:
            print(f"{workload.name} arm {kind} failed:", traceback.format_exc(limit=-3), sep="\n", flush=True)
        print(f"  arm {kind}: {perf_counter() - started:.0f} s", flush=True)
    triple = f"{speculation.num_steps}/{speculation.topk}/{speculation.num_draft_tokens}"
    print(f"\n{workload.name} {triple} batch {options.batch}{'':8}" + "".join(f"{kind:>12}" for kind in found))
    for name in next(iter(found.values()), {}):
        print(f"  {name:32}" + "".join(f"{values.get(name, float('nan')):12.3f}" for values in found.values()))
    if len(found) == len(ARMS):
        speed = {kind: values["token/s"] for kind, values in found.items()}
        lengths = {round(values["accept length"], 6) for values in found.values()}
        print(
            f"  c/a {speed['c'] / speed['a']:.4f}   c/b {speed['c'] / speed['b']:.4f}   "
            f"accept lengths {'equal' if len(lengths) == 1 else sorted(lengths)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=["smollm2", "llama8b"], help="shapes of random weights")
    parser.add_argument("--target", help="a real target, with --draft and --prompts")
    parser.add_argument("--draft", default="random", help="folder of a draft, or `random`")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--triple", default="5/1/6", help="steps/topk/draft tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", help="default bfloat16 on a GPU, float32 else")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    speculation = SpeculationSettings(*map(int, options.triple.split("/")))
    print(torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch", torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        if options.target:
            compare_arms(real_workload(dtype, device, options), speculation, options)
        else:
            for shape in options.shape:
                compare_arms(dummy_workload(shape, Path(folder), dtype, device, options), speculation, options)
    if device.type == "cuda":
        compare_sums(speculation.num_steps + 1, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
