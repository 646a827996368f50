"""What each verify step of a finished text should have accepted: its tree grown again by the plain rule, and held against the text.

The rule (EAGLE-2, Li et al. 2024; draft-checkpoints 4.2). At length L the draft knows the true pairs 0 .. L - 1. Level 0 are the topk
proposals after pair L - 1; level r are the proposals of the topk best candidates of level r - 1 by summed log q, each run as the pair (its
token, feedback of its parent) at position L + r - 1 behind the true pairs and its own ancestors. The num_draft_tokens - 1 best of all
candidates are kept; ties go to the earlier one. A step accepts as far as kept nodes follow the text.

Every candidate that is run is a sequence of its own with a line of slots of its own: no tree mask and no permuted table has a part in it.
All steps of a text are grown side by side, level by level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from eaglecli.engine.request import Request
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.verification.text_pass import Models, TextPass, addressing, with_room
from eaglecli.verification.token_rule import Children, propose

Path = tuple[int, ...]  # tokens from a child of the root down


@dataclass(frozen=True)
class StepPlace:
    """One verify step of a text: the length it began at (known tokens - 1) and the tokens it delivered."""

    length: int
    num_delivered: int


@dataclass
class _Node:
    token: int
    path: Path
    score: float  # summed log q
    hidden: torch.Tensor  # [H] feedback of its parent
    slots: tuple[int, ...]  # of its ancestors that were run, itself included once it was


@dataclass
class ExpectedTree:
    """The candidates of one step in order of growth, and how near every decision was."""

    place: StepPlace
    levels: list[list[_Node]] = field(default_factory=list)
    kept: frozenset[Path] = frozenset()
    margins: list[float] = field(default_factory=list)  # by level: smallest gap of the decisions that made its candidates
    keep_margin: float = math.inf

    @property
    def scores(self) -> Mapping[Path, float]:
        """Summed log q of every candidate."""
        return {node.path: node.score for level in self.levels for node in level}

    def num_accepted(self, text: Sequence[int]) -> int:
        """Kept nodes in a row that are the tokens of the text behind this step's root, no more than were delivered."""
        follows = tuple(text[self.place.length + 1 : self.place.length + 1 + self.place.num_delivered])
        return next((depth for depth in range(len(follows)) if follows[: depth + 1] not in self.kept), len(follows))

    def margin(self, depth: int) -> float:
        """Smallest gap of all decisions that settle whether a node of this depth (1 = child of the root) is in the tree."""
        return min([self.keep_margin, *self.margins[:depth]])


@torch.inference_mode()
def grow_expected_trees(
    models: Models, text: TextPass, request: Request, places: Sequence[StepPlace], speculation: SpeculationSettings, context_length: int
) -> list[ExpectedTree]:
    """The tree of every place, see the module docstring."""
    topk, num_levels = speculation.topk, speculation.num_steps
    trees = [ExpectedTree(place) for place in places]
    if not trees:
        return trees
    text = with_room(text, len(trees) * (num_levels - 1) * topk)
    lengths = torch.tensor([place.length for place in places], device=models.device)
    after = lengths - text.prompt_len
    proposals = propose(text.draft_logits[after], topk, request, lengths + 1, models.draft.token_map)
    roots = [_Node(-1, (), 0.0, hidden, ()) for hidden in text.draft_feedback[after]]
    _add_level(trees, [[root] for root in roots], proposals, [[root.hidden] for root in roots], request)
    for level in range(1, num_levels):
        beams = [_choose_beams(tree, topk, level) for tree in trees]
        children, feedback = _run_beams(models, text, request, trees, beams, level, topk, context_length)
        _add_level(trees, beams, children, feedback, request)
    for tree in trees:
        _keep(tree, speculation.num_draft_tokens - 1)
    return trees


def _add_level(
    trees: Sequence[ExpectedTree],
    beams: Sequence[Sequence[_Node]],
    children: Children,
    feedback: Sequence[Sequence[torch.Tensor]],
    request: Request,
) -> None:
    """The children of all beams, tree after tree, beam after beam, as the next level."""
    tokens, log_q, margins = children.tokens.tolist(), children.log_q.tolist(), children.margin.tolist()
    scale = request.sampling.temperature or 1.0  # margins in units of logits
    row = 0
    for tree, own_beams, own_feedback in zip(trees, beams, feedback, strict=True):
        has_margin = len(tree.margins) > len(tree.levels)  # of the choice of these beams
        level, margin = [], tree.margins.pop() if has_margin else math.inf
        for beam, hidden in zip(own_beams, own_feedback, strict=True):
            for token, score in zip(tokens[row], log_q[row], strict=True):
                level.append(_Node(token, (*beam.path, token), beam.score + score, hidden, beam.slots))
            margin = min(margin, margins[row] * scale)
            row += 1
        tree.levels.append(level)
        tree.margins.append(margin)


def _choose_beams(tree: ExpectedTree, topk: int, level: int) -> list[_Node]:
    """The nodes of the last level that are run: all of level 0, in order; of a later level the topk best, best first."""
    last = tree.levels[-1]
    if level == 1:
        return last
    ranked = sorted(last, key=lambda node: -node.score)  # stable: ties stay in order of growth
    tree.margins.append(_gap(ranked, topk))
    return ranked[:topk]


def _run_beams(
    models: Models,
    text: TextPass,
    request: Request,
    trees: Sequence[ExpectedTree],
    beams: Sequence[Sequence[_Node]],
    level: int,
    topk: int,
    context_length: int,
) -> tuple[Children, list[list[torch.Tensor]]]:
    """One draft forward over the beams of all trees; their children, and the feedback of every beam."""
    first_slot = len(text.ids) - 1 + (level - 1) * topk * len(trees)
    lengths = torch.tensor([tree.place.length for tree in trees], device=models.device).repeat_interleave(topk)
    longest = int(lengths.max())
    table = torch.arange(longest + level, dtype=torch.int32).repeat(len(lengths), 1)
    row = 0
    for tree, own in zip(trees, beams, strict=True):
        for beam in own:
            beam.slots = (*beam.slots, first_slot + row)
            table[row, tree.place.length : tree.place.length + level] = torch.tensor(beam.slots, dtype=torch.int32)
            row += 1
    nodes = [beam for own in beams for beam in own]
    out_slots = torch.tensor([node.slots[-1] for node in nodes], dtype=torch.int32, device=models.device)
    positions = (lengths + level - 1).clamp(max=context_length - 1).int()
    inputs = addressing(models, table.to(models.device), (lengths + level - 1).int(), positions, out_slots, queries=1)
    tokens = torch.tensor([node.token for node in nodes], device=models.device)
    output = models.draft.forward(tokens, torch.stack([node.hidden for node in nodes]), positions, text.draft_cache, inputs)
    children = propose(models.draft.logits(output.head_input), topk, request, lengths + level + 1, models.draft.token_map)
    rows = list(output.feedback)
    return children, [rows[start : start + topk] for start in range(0, len(rows), topk)]


def _keep(tree: ExpectedTree, count: int) -> None:
    pool = [node for level in tree.levels for node in level]
    ranked = sorted(pool, key=lambda node: -node.score)
    tree.kept = frozenset(node.path for node in ranked[:count])
    tree.keep_margin = _gap(ranked, count)


def _gap(ranked: Sequence[_Node], count: int) -> float:
    """Between the last of the `count` best and the best of the others."""
    if len(ranked) <= count:
        return math.inf
    last, next_one = ranked[count - 1].score, ranked[count].score
    return 0.0 if last == next_one else last - next_one  # -inf - -inf is NaN
