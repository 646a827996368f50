"""Settings of the engine: how far it speculates and how much it holds at once. Frozen; commands resolve them once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from eaglecli.errors import UserError


@dataclass(frozen=True)
class SpeculationSettings:
    """The triple of EAGLE: tree depth, branches per node, nodes verified with the root counted.

    `num_steps` 0 is plain decoding: a tree of the root alone. Same meaning as in SGLang (srt/server_args.py).
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        steps, topk, nodes = self.num_steps, self.topk, self.num_draft_tokens
        if (steps, topk, nodes) == (0, 1, 1):
            return  # plain decoding
        if steps < 1 or topk < 1:
            raise UserError(f"--speculative-num-steps {steps} and --speculative-eagle-topk {topk} must be at least 1")
        if nodes < steps + 1:
            raise UserError(f"--speculative-num-draft-tokens {nodes} cannot hold the root and {steps} steps", f"use {steps + 1} or more")
        if topk == 1 and nodes != steps + 1:
            raise UserError(
                f"--speculative-num-draft-tokens {nodes} does not fit a chain of {steps} steps",
                f"with --speculative-eagle-topk 1 it is steps + 1 = {steps + 1}",
            )
        if nodes - 1 > self.num_candidates:
            raise UserError(
                f"--speculative-num-draft-tokens {nodes} is more than the tree can have",
                f"{steps} steps of {topk} branches make {self.num_candidates} nodes and the root: use {self.num_candidates + 1} or less",
            )

    def __str__(self) -> str:
        return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}" if self.num_steps else "none"

    @property
    def num_candidates(self) -> int:
        """Nodes that the draft scores: topk + (steps - 1) * topk^2."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def lookahead(self) -> int:
        """Slots past a row's length that one iteration may write: by the verify tree or by the draft's steps.

        Once is enough although one iteration may be in flight: a row's length is frozen on the device at its limit.
        """
        return max(self.num_draft_tokens, self.topk * (self.num_steps - 1))


def check_simulated_length(accept_length: float, num_steps: int) -> None:
    """Raises UserError for tokens of a step that drafts of so many steps cannot make."""
    if not 1 <= accept_length <= num_steps + 1:
        raise UserError(
            f"--simulate-acc-len {accept_length:g} cannot be reached in {num_steps} steps",
            f"use 1 to {num_steps + 1}: accepted drafts and the target's own token",
        )


def check_windows(whose: str, windows: Sequence[int | None], speculation: SpeculationSettings) -> None:
    """Refuse a tree that does not fit into a sliding window: its nodes see all their ancestors, see kernels/attention_inputs.py.

    `windows` are a model's, one a layer, None = no window. Raises UserError.
    """
    narrowest = min((window for window in windows if window is not None), default=None)
    if narrowest is not None and speculation.num_steps >= max(narrowest, 1):
        raise UserError(
            f"--speculative-num-steps {speculation.num_steps} is too deep for the {whose}'s sliding window of {narrowest} tokens",
            f"use --speculative-num-steps {narrowest - 1} or less" if narrowest > 1 else "use plain decoding: --draft none",
        )


MAX_LOGPROBS = 20  # as OpenAI's API allows
PLAIN = SpeculationSettings(num_steps=0, topk=1, num_draft_tokens=1)


@dataclass(frozen=True)
class Alternative:
    """Speculation that an engine may change to between iterations, for batches of up to `max_requests`."""

    speculation: SpeculationSettings
    max_requests: int


@dataclass(frozen=True)
class SchedulingSettings:
    """How waiting requests are ordered and admitted. Another choice than the default one only to measure its worth."""

    window: int = 4096  # requests that wait in the engine at most, when it takes them from an iterator
    max_overtaking: int = 16384  # nobody is overtaken by a request that arrived later by more than this many
    longest_first: bool = True  # False: first come, first served
    grows: bool = True  # False: all pages up to the cap are taken at admission
    growth_tokens: int = 64  # a row takes pages for so many at a time, so that it seldom grows
    pledged_share: float = 0.25  # of the output that is still to be expected: memory kept for it when a request is admitted
    group_share: float = 0.125  # of all rows: on a GPU requests are admitted by so many, for a small prefill costs as much as a step

    def group_size(self, max_running_requests: int) -> int:
        """Requests of one admission."""
        return max(1, int(self.group_share * max_running_requests))


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of one engine. `max_total_tokens` counts KV slots, look-ahead included; all of them are allocated at the start."""

    context_length: int
    max_total_tokens: int
    max_running_requests: int = 16
    page_size: int = 16
    chunked_prefill_size: int = 512  # most prompt tokens of one step
    max_stop_ids: int = 16
    graph_sizes: tuple[int, ...] = ()  # ascending batch sizes (requests) that iterations are padded to, and captured at on a GPU
    pads_to_graph_sizes: bool = True  # False: only a batch of exactly such a size runs at it, by graph; all others eagerly
    speculation: SpeculationSettings = PLAIN
    is_deterministic: bool = False  # no bit of a text depends on batch, chunk, order, graph or draft; models must be loaded for it
    alternatives: tuple[Alternative, ...] = ()  # beside `speculation`; which of all runs is for the engine's policy to say
    max_backlog_tokens: int = 128  # tokens that a row decoded plainly and the draft can catch up with; a multiple of 128
    scheduling: SchedulingSettings = SchedulingSettings()
    same_noise_drafting: bool = True  # sampled rows draft with the noise the target will use; off only to measure its worth
    adjusts_logits: bool = False  # requests may ask for penalties, bias and a least length: two tables of [rows, vocabulary] more
    max_logprobs: int | None = None  # most alternatives a request may ask log-probabilities of; None: no log-probabilities at all
    simulated_accept_length: float | None = None  # speed runs only: every step accepts by prescription, the text means nothing

    def __post_init__(self) -> None:
        for flag in ("context_length", "max_total_tokens", "max_running_requests", "page_size", "chunked_prefill_size"):
            if getattr(self, flag) < 1:
                raise UserError(f"--{flag.replace('_', '-')} {getattr(self, flag)} must be at least 1")
        if list(self.graph_sizes) != sorted(set(self.graph_sizes)) or min(self.graph_sizes, default=1) < 1:
            raise UserError(f"--cuda-graph-bs {self.graph_sizes} must be ascending batch sizes of at least 1")
        if self.max_logprobs is not None and not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise UserError(f"--logprobs {self.max_logprobs} must be from 0 to {MAX_LOGPROBS}")
        if len(set(self.all_speculation)) < len(self.all_speculation):
            raise UserError("the same speculation is named twice", "name each triple once")
        if self.simulated_accept_length is not None:
            check_simulated_length(self.simulated_accept_length, self.speculation.num_steps)
        if self.max_backlog_tokens < 1 or self.max_backlog_tokens % 128:
            raise ValueError(f"a backlog of {self.max_backlog_tokens} tokens is no multiple of 128")

    @cached_property
    def all_speculation(self) -> tuple[SpeculationSettings, ...]:
        """`speculation` and its alternatives; a number in this order names one for the engine's policy."""
        return (self.speculation, *(alternative.speculation for alternative in self.alternatives))

    @cached_property
    def lookahead(self) -> int:
        """Slots past a row's length that one iteration may write, however it speculates."""
        return max(speculation.lookahead for speculation in self.all_speculation)

    @cached_property
    def run_width(self) -> int:
        """Most tokens that an iteration can add to a row."""
        return max(speculation.num_steps for speculation in self.all_speculation) + 1

    @property
    def num_candidates(self) -> int:
        """Tokens for the first level of the next tree that are kept of every row."""
        return max(speculation.topk for speculation in self.all_speculation)

    @property
    def num_pages(self) -> int:
        """Whole pages of the cache."""
        return self.max_total_tokens // self.page_size

    @property
    def row_capacity(self) -> int:
        """Columns of the slot table: the longest row and its look-ahead, in whole pages."""
        return -(-(self.context_length + self.lookahead) // self.page_size) * self.page_size
