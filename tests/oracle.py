"""The oracle: a slow, obvious generator that says what the engine must write. Tests only; nothing of the engine or its kernels is used.

No pages, graphs, chunks, batches or caches: every number comes from a full causal forward over a Python list of tokens. What is reproduced:

- `ids` are the known tokens, L = len(ids) - 1. The first output token is chosen from the prompt's last logits, at position len(prompt).
- Draft: the true pairs are (ids[i + 1], h_i) at position i < L, h the target's feature. A tree node of level l (0 = child of the root) is
  the pair (its token, feedback of its parent) at position L + l and sees the true pairs and its own ancestors; level 0 takes the feedback
  of the last true pair.
- Every expanded node gets K = topk children: the best by logit, or for sampled rows with the same noise by logit / temperature + G at
  position L + 1 + l, which is the position of the token being drafted. log q is the float32 log-softmax over the draft vocabulary of
  what they are chosen by, in units of logits: of the logits, or of logit + temperature * G. The pool holds K + (S - 1) K^2 entries in
  order of growth.
- Ranks use summed log q: level 0 grows in pool order, of a later level the K best grow the next one, best first; the
  N - 1 best of the pool are kept; ties go to the lowest pool index (draft-checkpoints 4.2). Kept nodes stay in pool order behind the root.
- Verify: at each node one token is chosen from the target's logits over the node's full prefix; walk while a kept child holds it. A node
  at a position >= prompt + max_new_tokens is never accepted. Emitted = accepted drafts + the last chosen token; only then is the output
  cut, after the first stop id or at the cap. Accept counts are taken before the cut.
- Choosing (design 3): greedy = lowest-id arg-max; sampled = temperature, top-k, top-p, min-p, then Gumbel-max with Philox4x32-10 noise
  keyed by (seed, sample, absolute position of the chosen token, token id). Draws below 2^-8 use the series, none exceeds 1 - 2^-24.
- Before all that the logits are adjusted by what came before the chosen token: bias, repetition penalty (prompt and output), frequency
  and presence penalty (output), stop ids barred while the output is shorter than its least length. Log-probabilities are of the
  logits before any of it.

Notation: n tokens, H hidden size, F feature width, V target and Vd draft vocabulary. All tensors are float32 on the CPU.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from eaglecli.engine.request import SamplingParams
from tests.oracle_models import OracleDraft, OracleTarget

LogitsAndFeatures = Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]  # ids[n] -> logits [n, V], features [n, F]

# ---- noise and choice


def philox4x32(counter: Sequence[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Ten rounds of Philox4x32 (Salmon et al. 2011, Random123): four uint64 arrays holding 32-bit words in and out."""
    low32 = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & low32,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & low32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def gumbel_from_bits(bits: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, float32, of 32-bit draws: finite for every draw."""
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    v = np.minimum(v, np.float32(1 - 2.0**-24))
    exponential = np.where(v < np.float32(2.0**-8), v + v * v / 2 + v * v * v / 3, -np.log(np.float32(1) - v))
    return -np.log(exponential)


def gumbel_noise(seed: int, sample: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """Noise float32 [n] of the tokens `token_ids` [n] at one absolute position."""
    ids = token_ids.astype(np.uint64)
    same = np.ones_like(ids)
    counter = [ids >> np.uint64(2), same * np.uint64(position), same * np.uint64(sample), same * np.uint64(0)]
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return gumbel_from_bits(np.choose((ids & np.uint64(3)).astype(np.int64), words))


def adjust(logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """What the token after `prompt` and `output` is chosen from: float32 [V], one token at a time."""
    scores = logits.to(torch.float32).clone()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= sampling.frequency_penalty * count
        scores[token] -= sampling.presence_penalty
    if len(output) < sampling.min_new_tokens:
        for token in sampling.stop_token_ids:
            scores[token] = -math.inf
    return scores


def choice_scores(logits: torch.Tensor, sampling: SamplingParams, sample: int, position: int) -> np.ndarray:
    """What the chosen token is the arg-max of: float32 [V], -inf for tokens that a filter removed. `logits` [V]."""
    raw = logits.to(torch.float32).numpy()
    if not np.isfinite(raw.max()):
        raise ValueError(f"non-finite target logits at position {position}")
    if sampling.temperature == 0:
        return raw
    scaled = (raw - raw.max()) / np.float32(sampling.temperature)
    kept = np.argsort(-scaled, kind="stable")
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    weight = np.exp(scaled[kept].astype(np.float64))
    if sampling.top_p < 1:
        mass_before = np.cumsum(weight) - weight
        kept = kept[mass_before < sampling.top_p * weight.sum()]
    kept = kept[weight[: len(kept)] >= sampling.min_p * weight[0]]
    scores = np.full(raw.shape, -np.inf, dtype=np.float32)
    scores[kept] = scaled[kept] + gumbel_noise(sampling.seed, sample, position, kept)
    return scores


def choose_token(logits: torch.Tensor, sampling: SamplingParams, sample: int, position: int) -> int:
    """The one rule of choosing; numpy's arg-max takes the lowest id of a tie."""
    return int(choice_scores(logits, sampling, sample, position).argmax())


Target = OracleTarget | LogitsAndFeatures  # a callable must itself give the features that its draft wants


# ---- the tree


@dataclass(frozen=True, eq=False)
class PoolNode:
    """A drafted token: `parent` is a pool index (-1 = root), `score` the summed log q, `hidden` [H] the feedback of its parent."""

    token: int
    parent: int
    level: int
    score: np.float32
    hidden: torch.Tensor


@dataclass(frozen=True)
class OracleTree:
    """The kept nodes behind the root, in pool order: parents are node numbers, -1 for the root."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]


def best(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` largest scores, best first, ties to the lowest index."""
    return np.argsort(-np.asarray(scores, dtype=np.float32), kind="stable")[:count].tolist()


def ancestors_and_self(pool: list[PoolNode], index: int) -> list[PoolNode]:
    """The path from a child of the root down to pool entry `index`; empty for the root (-1)."""
    return [] if index < 0 else [*ancestors_and_self(pool, pool[index].parent), pool[index]]


@dataclass(frozen=True)
class DraftRule:
    """How children are picked: `sampling` None = by logit alone, else logit / temperature + the noise that the target will meet."""

    num_steps: int
    topk: int
    sampling: SamplingParams | None = None
    sample: int = 0

    def children(self, logits: torch.Tensor, position: int, token_map: np.ndarray | None) -> list[tuple[int, np.float32]]:
        """(target id, log q) of the best children, best first. Draft `logits` [Vd]: NaN counts as -inf, +inf as the largest number."""
        largest = torch.finfo(torch.float32).max
        finite = logits.float().nan_to_num(-math.inf, posinf=largest, neginf=-math.inf)
        ids = np.arange(len(finite)) if token_map is None else token_map
        scores = perturbed = finite.numpy()
        if self.sampling is not None and self.sampling.temperature > 0:
            noise = gumbel_noise(self.sampling.seed, self.sample, position, ids)
            temperature = np.float32(self.sampling.temperature)
            scores = (scores - max(scores.max(), np.float32(-largest))) / temperature + noise
            perturbed = perturbed + temperature * noise
        log_q = torch.from_numpy(perturbed).log_softmax(-1).nan_to_num(-math.inf, neginf=-math.inf).numpy()
        return [(int(ids[index]), log_q[index]) for index in best(scores, self.topk)]


def grow_pool(draft: OracleDraft, tokens: list[int], hidden: torch.Tensor, rule: DraftRule) -> list[PoolNode]:
    """All candidates in order of growth. True pairs: `tokens` [L] with fused `hidden` [L, H]."""
    pool: list[PoolNode] = []
    beams = [-1]
    for level in range(rule.num_steps):
        first = len(pool)
        for beam in beams:
            path = ancestors_and_self(pool, beam)
            pairs = [*tokens, *(node.token for node in path)], torch.cat([hidden, *(node.hidden[None] for node in path)])
            feedback, logits = draft.forward(*pairs)
            score = path[-1].score if path else np.float32(0)
            for token, child_log_q in rule.children(logits[-1], len(tokens) + 1 + level, draft.token_map):
                pool.append(PoolNode(token, beam, level, score + child_log_q, feedback[-1]))
        level_best = best([node.score for node in pool[first:]], rule.topk)
        beams = [first + index for index in level_best] if level > 0 else list(range(len(pool)))
    return pool


def keep_nodes(pool: list[PoolNode], root_token: int, num_draft_tokens: int) -> OracleTree:
    """The num_draft_tokens - 1 best of the pool behind the root; the stable order keeps every parent of a kept node."""
    kept = sorted(best([node.score for node in pool], num_draft_tokens - 1))
    node_number = {-1: 0, **{index: number + 1 for number, index in enumerate(kept)}}
    return OracleTree(
        tokens=(root_token, *(pool[index].token for index in kept)),
        parents=(-1, *(node_number[pool[index].parent] for index in kept)),
        depths=(0, *(pool[index].level + 1 for index in kept)),
    )


# ---- generation


@dataclass
class OracleResult:
    """The answer. Per verify step: `accept_counts` (accepted drafts, before any cut) and `trees`."""

    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    accept_counts: list[int] = field(default_factory=list)
    trees: list[OracleTree] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)  # of `generate_plain`: float32 [V] at each output token

    def accepted_at_depth(self, num_steps: int) -> list[int]:
        """Verify steps that accepted a draft at depth 1, 2, ..., num_steps."""
        return [sum(count >= depth for count in self.accept_counts) for depth in range(1, num_steps + 1)]


def as_function(target: Target, tap_boundaries: tuple[int, ...]) -> LogitsAndFeatures:
    return functools.partial(target.forward, tap_boundaries=tap_boundaries) if isinstance(target, OracleTarget) else target


def emit(result: OracleResult, tokens: list[int], sampling: SamplingParams) -> bool:
    """Append until a stop id or the cap; true when the output has ended."""
    for token in tokens:
        result.output_ids.append(token)
        if token in sampling.stop_token_ids:
            result.finish_reason = "stop"
            return True
        if len(result.output_ids) == sampling.max_new_tokens:
            return True
    return False


def generate_plain(target: Target, prompt_ids: Sequence[int], sampling: SamplingParams, sample: int = 0) -> OracleResult:
    """One target forward over the whole prefix per token."""
    forward, result = as_function(target, ()), OracleResult()
    ids = [int(token) for token in prompt_ids]
    while True:
        logits = forward(ids)[0][-1]
        result.logprobs.append(logits.to(torch.float32).log_softmax(-1))
        token = choose_token(adjust(logits, sampling, prompt_ids, result.output_ids), sampling, sample, len(ids))
        ids.append(token)
        if emit(result, [token], sampling):
            return result


def walk(
    forward: LogitsAndFeatures, tree: OracleTree, prompt: list[int], output: list[int], sampling: SamplingParams, sample: int
) -> list[int]:
    """Emitted tokens of one verify step: accepted drafts, then the last chosen token."""
    emitted: list[int] = []
    node, limit = 0, len(prompt) + sampling.max_new_tokens
    while True:
        position = len(prompt) + len(output) + len(emitted)
        logits = forward(prompt + output + emitted)[0][-1]
        token = choose_token(adjust(logits, sampling, prompt, output + emitted), sampling, sample, position)
        emitted.append(token)
        children = [child for child, parent in enumerate(tree.parents) if parent == node and tree.tokens[child] == token]
        if not children or position >= limit:
            return emitted
        node = children[0]


def generate_eagle(
    target: Target,
    draft: OracleDraft,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    sample: int = 0,
    same_noise: bool = True,
) -> OracleResult:
    """The loop of the module docstring for one request. `same_noise` False: sampled rows draft by the logits alone."""
    forward, result = as_function(target, draft.tap_boundaries), OracleResult()
    rule = DraftRule(num_steps, topk, sampling if same_noise else None, sample)
    prompt = [int(token) for token in prompt_ids]
    first = adjust(forward(prompt)[0][-1], sampling, prompt, [])
    ended = emit(result, [choose_token(first, sampling, sample, len(prompt))], sampling)
    while not ended:
        ids = prompt + result.output_ids
        hidden = draft.fuse(forward(ids[:-1])[1])
        tree = keep_nodes(grow_pool(draft, ids[1:], hidden, rule), ids[-1], num_draft_tokens)
        emitted = walk(forward, tree, prompt, result.output_ids, sampling, sample)
        result.trees.append(tree)
        result.accept_counts.append(len(emitted) - 1)
        ended = emit(result, emitted, sampling)
    return result


# ---- judging


def candidate_gap(target: Target, ids: Sequence[int], tokens: tuple[int, int], sampling: SamplingParams, sample: int = 0) -> float:
    """Distance of two candidates for the token after `ids`, in what is maximised: small = a near-tie. inf if a filter removed one."""
    known = [int(token) for token in ids]
    scores = choice_scores(as_function(target, ())(known)[0][-1], sampling, sample, len(known))
    return float(abs(scores[tokens[0]] - scores[tokens[1]]))


def teacher_forced_agreement(target: Target, draft: OracleDraft, ids: Sequence[int], start: int, num_steps: int) -> list[float]:
    """Share of the places in a finished text whose greedy draft chain meets the text 1, 2, ..., num_steps deep.

    Places are the prefixes ids[:i + 1], i >= start, that are followed by num_steps more tokens.
    """
    text = [int(token) for token in ids]
    hidden = draft.fuse(as_function(target, draft.tap_boundaries)(text)[1])
    places = range(max(start, 1), len(text) - num_steps)
    meetings = np.zeros((len(places), num_steps), dtype=bool)
    for row, i in enumerate(places):
        chain = grow_pool(draft, text[1 : i + 1], hidden[:i], DraftRule(num_steps, topk=1))
        meetings[row] = np.cumprod([node.token == text[i + 1 + level] for level, node in enumerate(chain)])
    return meetings.mean(0).tolist()
