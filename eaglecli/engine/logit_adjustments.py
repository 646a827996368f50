"""Tables of penalties, bias and least lengths: allocated once, a row written when its request is admitted.

They exist only in an engine that was opened for them (`EngineSettings.adjusts_logits`), as log-probabilities do (`max_logprobs`).
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from eaglecli.engine.sequence import Sequence
from eaglecli.engine.settings import EngineSettings
from eaglecli.engine.staging import to_device
from eaglecli.kernels.adjust_logits import AdjustmentTensors

BYTES_PER_ENTRY = 8  # of a row and token: a count and a bias


def allocate_adjustments(settings: EngineSettings, vocab_size: int, device: torch.device) -> AdjustmentTensors | None:
    """Tables of all rows, the dummy row included, which asks for nothing; None unless the settings want them."""
    if not settings.adjusts_logits:
        return None
    num_rows = settings.max_running_requests + 1

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

    return AdjustmentTensors(
        is_adjusted=zeros(dtype=torch.bool),
        repetition_penalty=zeros() + 1,
        presence_penalty=zeros(),
        frequency_penalty=zeros(),
        min_until=zeros(dtype=torch.int32),
        counts=zeros(vocab_size, dtype=torch.int32),
        bias=zeros(vocab_size),
    )


def write_adjustments(tables: AdjustmentTensors, admitted: Rows[Sequence]) -> None:
    """Set the rows of newly admitted requests. The large tables are touched only for those that ask for something."""
    device, vocab_size = tables.counts.device, tables.counts.shape[1]
    samplings = [sequence.request.sampling for sequence in admitted]
    min_until = [sequence.prompt_len + sampling.min_new_tokens for sequence, sampling in zip(admitted, samplings, strict=True)]
    numbers = [[sequence.row for sequence in admitted], [sampling.adjusts_logits for sampling in samplings], min_until]
    penalties = [[sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty] for sampling in samplings]
    rows, is_adjusted, min_until_d = to_device(np.array(numbers, np.int64), device)
    tables.is_adjusted[rows] = is_adjusted.bool()
    tables.min_until[rows] = min_until_d.int()
    repetition, presence, frequency = to_device(np.array(penalties, np.float32), device).unbind(1)
    tables.repetition_penalty[rows], tables.presence_penalty[rows], tables.frequency_penalty[rows] = repetition, presence, frequency
    asking = [sequence for sequence in admitted if sequence.request.sampling.adjusts_logits]
    if not asking:
        return
    asking_rows = to_device(np.array([sequence.row for sequence in asking]), device)
    tables.counts.index_fill_(0, asking_rows, 0)
    tables.bias.index_fill_(0, asking_rows, 0)
    prompts = [sequence.row * vocab_size + sequence.request.prompt_ids.astype(np.int64) for sequence in asking]
    tables.counts.view(-1).index_fill_(0, to_device(np.concatenate(prompts), device), 1)
    resumed = [sequence for sequence in asking if sequence.is_resumed]
    if resumed:
        places, values = (np.concatenate(parts) for parts in zip(*(_counts_of_output(s, vocab_size) for s in resumed), strict=True))
        tables.counts.view(-1)[to_device(places, device)] = to_device(values, device).int()
    biased = [(sequence.row * vocab_size + token, bias) for sequence in asking for token, bias in sequence.request.sampling.logit_bias]
    if biased:
        where, biases = zip(*biased, strict=True)
        tables.bias.view(-1)[to_device(np.array(where, np.int64), device)] = to_device(np.array(biases, np.float32), device)


def _counts_of_output(sequence: Sequence, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 places in the table and counts of the tokens that a sequence put out before it lost its row; each place once."""
    token_ids, num_times = np.unique(sequence.emitted.token_ids, return_counts=True)
    return sequence.row * vocab_size + token_ids.astype(np.int64), 2 * num_times + np.isin(token_ids, sequence.request.prompt_ids)
