"""The checks of `eaglecli verify`, each a function from recomputed answers to the differences it found.

- `compare_texts`: the text with the draft against the text without: a wrong mask, position or cache of the verify shows here.
- `check_choices`: every token of a text against the target's own choice after the tokens before it: what is wrong in both runs shows here.
- `check_acceptance`: the drafts that every step accepted against those that it should have: a wrong hidden state, position, cache or token
  of the draft cannot change the text, and shows only here.
- `check_balance`: steps that accepted fewer drafts than they should against steps that accepted more. Numbers that move do both alike; a
  draft that is fed wrongly accepts fewer, even where every single step can be excused (bfloat16, large trees).
- `check_counts`: C = 1 + A + V - cut, and nothing but the last step was cut.
"""

from collections.abc import Iterator

import numpy as np

from eaglecli.engine.request import Completion
from eaglecli.verification.difference import Difference, judge
from eaglecli.verification.reference_run import ReferenceRun

ONE_IN = 1_000_000  # chances: a difference so improbable, or more so, is no longer taken for chance


def compare_texts(run: ReferenceRun, plain: Completion) -> Iterator[Difference]:
    """The first difference of a drafted answer from the plain one, if there is one."""
    ours, theirs = run.completion.output_ids, plain.output_ids
    shared = min(len(ours), len(theirs))
    parted = np.flatnonzero(ours[:shared] != theirs[:shared])
    key = plain.request.key
    if len(parted):
        place = int(parted[0])
        drafted, undrafted = int(ours[place]), int(theirs[place])
        gap = float((run.scores[place, drafted] - run.scores[place, undrafted]).abs())
        limit = run.score_limit(place)
        sentence = f"token {drafted} with the draft, {undrafted} without"
        yield Difference("text", judge(gap, limit), key, place, sentence, gap, limit)
    elif len(ours) != len(theirs) or run.completion.finish_reason != plain.finish_reason:
        sentence = f"{len(ours)} tokens ({run.completion.finish_reason}) with the draft, {len(theirs)} ({plain.finish_reason}) without"
        yield Difference("text", "bug", key, shared, sentence)


def check_choices(run: ReferenceRun) -> Iterator[Difference]:
    """Every token of the answer that is not the best of its scores."""
    tokens = run.completion.output_ids.astype(np.int64)
    best, own = run.scores.max(1), run.scores.gather(1, run.scores.new_tensor(tokens).long()[:, None])[:, 0]
    for place in (own != best.values).nonzero()[:, 0].tolist():
        gap, limit = float(best.values[place] - own[place]), run.score_limit(place)
        sentence = f"token {tokens[place]}, the target alone chooses {int(best.indices[place])}"
        yield Difference("choice", judge(gap, limit), run.completion.request.key, place, sentence, gap, limit)


def check_acceptance(run: ReferenceRun) -> Iterator[Difference]:
    """Every step that accepted other drafts than its tree, grown again, has in common with the text."""
    text = run.ids.tolist()
    accept_counts = run.completion.accept_counts.tolist()
    for step, tree in run.trees.items():
        found, expected = min(accept_counts[step], tree.place.num_delivered), tree.num_accepted(text)
        if found != expected:
            gap, limit = tree.margin(min(found, expected) + 1), run.tree_limit(step)
            sentence = f"{found} drafts accepted, {expected} expected"
            yield Difference("acceptance", judge(gap, limit), run.completion.request.key, step, sentence, gap, limit)


def check_balance(num_fewer: int, num_more: int) -> Iterator[Difference]:
    """Over all answers of a run: a two-sided sign test, in whole numbers, which know no largest one."""
    count = num_fewer + num_more
    tail, ways = 0, 1  # of choosing so many steps out of all
    for number in range(min(num_fewer, num_more) + 1):
        tail += ways
        ways = ways * (count - number) // (number + 1)
    if 2 * tail * ONE_IN < 1 << count:
        sentence = f"{num_fewer} steps accepted fewer drafts than expected and {num_more} more: numbers that move do both alike"
        yield Difference("balance", "bug", "all answers", 0, sentence)


def check_counts(completion: Completion) -> Iterator[Difference]:
    """An answer whose counts do not add up to its tokens."""
    num_tokens, key = len(completion.output_ids), completion.request.key
    expected = 1 + completion.num_accepted_drafts + completion.num_verify_steps - completion.num_cut_tokens
    before_last = 1 + int((completion.accept_counts[:-1].astype(np.int64) + 1).sum())
    if num_tokens != expected:
        yield Difference("counts", "bug", key, num_tokens, f"{num_tokens} tokens, the counts make {expected}")
    elif num_tokens <= before_last and completion.num_verify_steps:
        yield Difference("counts", "bug", key, num_tokens, f"{num_tokens} tokens, the steps before the last made {before_last}")
