"""How far a training is and what follows from it: the end by the first budget, a learning rate that warms up and falls by a cosine."""

import math
from dataclasses import dataclass

from eaglecli.training.settings import TrainSettings


@dataclass
class TrainProgress:
    """Counts over all calls. `optimizer_steps` begins anew when the optimizer's state was not carried along."""

    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    optimizer_steps: int = 0


@dataclass(frozen=True)
class Schedule:
    """`num_steps` is the last step by number, tokens or epochs, infinite when time alone decides; `seconds` may end it sooner."""

    num_steps: float
    seconds: float | None
    learning_rate: float
    warmup_steps: int

    def share_done(self, progress: TrainProgress) -> float:
        """0 at the start, 1 at the end."""
        by_time = 0.0 if self.seconds is None else progress.seconds / self.seconds
        return min(1.0, max(progress.step / self.num_steps, by_time))

    def is_done(self, progress: TrainProgress) -> bool:
        """Whether a budget is used up."""
        return self.share_done(progress) >= 1.0

    def learning_rate_of(self, progress: TrainProgress) -> float:
        """The rate of the next step."""
        warmup = min(1.0, (progress.optimizer_steps + 1) / self.warmup_steps)
        return self.learning_rate * warmup * 0.5 * (1.0 + math.cos(math.pi * self.share_done(progress)))


def make_schedule(settings: TrainSettings, num_sequences: int) -> Schedule:
    """The schedule of a training on `num_sequences` packed sequences."""
    limits = [settings.num_steps or math.inf]
    if settings.max_tokens is not None:
        limits.append(math.ceil(settings.max_tokens / settings.tokens_per_step))
    if settings.most_epochs is not None:
        limits.append(max(1, math.ceil(settings.most_epochs * num_sequences / settings.batch_size)))
    return Schedule(min(limits), settings.seconds, settings.learning_rate, settings.warmup_steps)
