"""What a training run is told: frozen, checked once, known to every part of the trainer."""

from dataclasses import dataclass
from math import gcd
from typing import Any

from eaglecli.errors import UserError

_AT_LEAST_ONE = (
    "num_samples",
    "max_new_tokens",
    "sequence_length",
    "draft_vocab_size",
    "num_unroll_steps",
    "batch_size",
    "warmup_steps",
    "evaluate_every",
    "max_running_requests",
    "held_out_new_tokens",
)
_ABOVE_ZERO = ("low_temperature", "learning_rate", "label_temperature", "step_decay", "clip_norm", "rope_theta", "checkpoint_every_s")
_OPTIONAL_ABOVE_ZERO = (
    "micro_batch_size",
    "max_answer_tokens",
    "epochs",
    "num_steps",
    "max_tokens",
    "seconds",
    "stop_after_s",
    "max_shard_bytes",
    "intermediate_size",
)
_LARGEST_FORWARD = 16
_DEFAULT_EPOCHS = 3


@dataclass(frozen=True)
class TrainSettings:
    """Field names are the long options in snake_case (`stop_after_s` and the like carry their unit).

    The schedule ends with the first of the given budgets that is used up: `num_steps`, `max_tokens` (packed positions),
    `seconds` (of training steps, over all calls), `epochs`; without any, after three epochs. `stop_after_s` ends one call
    early and changes nothing about the schedule.
    """

    # answers
    num_samples: int = 2  # answers per prompt: the first one greedy, the others sampled
    low_temperature: float = 0.7
    high_temperature: float = 1.0
    max_new_tokens: int = 512
    max_answer_tokens: int | None = None
    self_prompts: int = 0
    max_running_requests: int = 256
    # draft
    draft_vocab_size: int = 32_000
    tap_boundaries: tuple[int, ...] | None = None  # None: 2, N // 2, N - 3
    rope_theta: float = 10_000.0
    intermediate_size: int | None = None  # of the draft's MLP; None: the target's
    # training
    sequence_length: int = 2048
    num_unroll_steps: int = 7
    step_decay: float = 0.8
    label_temperature: float = 1.0  # of the target's distribution; below 1 the draft learns its first choice more than the rest
    batch_size: int = 32  # packed sequences per optimizer step
    micro_batch_size: int | None = None  # packed sequences per forward
    learning_rate: float = 1e-3
    warmup_steps: int = 30
    clip_norm: float = 0.5
    epochs: int | None = None
    num_steps: int | None = None
    max_tokens: int | None = None
    seconds: float | None = None
    stop_after_s: float | None = None
    # watching and keeping
    held_out: int = 64  # prompts that are never trained on
    held_out_new_tokens: int = 128
    evaluate_every: int = 200
    checkpoint_every_s: float = 60.0
    max_shard_bytes: int | None = None
    random_seed: int = 0

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            self._refuse(name, getattr(self, name) < 1, "at least 1")
        for name in _ABOVE_ZERO:
            self._refuse(name, not getattr(self, name) > 0, "above 0")
        for name in _OPTIONAL_ABOVE_ZERO:
            value = getattr(self, name)
            self._refuse(name, value is not None and not value > 0, "above 0")
        for name in ("self_prompts", "held_out", "random_seed"):
            self._refuse(name, getattr(self, name) < 0, "at least 0")
        is_uneven = self.batch_size % self.sequences_per_forward != 0
        self._refuse("batch_size", is_uneven, f"a multiple of --micro-batch-size {self.micro_batch_size}")
        self._refuse("sequence_length", self.sequence_length < 32, "at least 32")
        self._refuse("high_temperature", self.high_temperature < self.low_temperature, "at least --low-temperature")

    def _refuse(self, name: str, is_wrong: bool, rule: str) -> None:
        if is_wrong:
            shown: Any = getattr(self, name)
            raise UserError(f"--{name.removesuffix('_s').replace('_', '-')} {shown} must be {rule}")

    @property
    def tokens_per_step(self) -> int:
        """Packed positions of one optimizer step, padding included."""
        return self.batch_size * self.sequence_length

    @property
    def sequences_per_forward(self) -> int:
        """Packed sequences that run at a time; gradients add up over a step."""
        return self.micro_batch_size or gcd(self.batch_size, _LARGEST_FORWARD)

    @property
    def most_epochs(self) -> int | None:
        """Passes over the documents after which the schedule ends, None when other budgets decide alone."""
        has_other = any(budget is not None for budget in (self.num_steps, self.max_tokens, self.seconds))
        return self.epochs or (None if has_other else _DEFAULT_EPOCHS)
