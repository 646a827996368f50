"""Faults put into the engine on purpose, of kinds that other tools had: `verify` finds each with a sample smaller than its own."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eaglecli.commands._verify_sample import DEFAULT_NEW_TOKENS, DEFAULT_PROMPTS
from eaglecli.engine import draft as draft_module
from eaglecli.engine import extend as extend_module
from eaglecli.engine import prefill as prefill_module
from eaglecli.engine import verify as verify_module
from eaglecli.engine.draft import EagleDrafter
from eaglecli.engine.outputs import OutputBuffers
from eaglecli.kernels import commit_run as commit_module
from tests.verification.small_run import Size, examined, generate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the faults are put into the CPU's kernels")

TREE = (6, 3, 14)  # of fewer levels, TWIN gets nearly all accepted, whatever a faint fault does
Patch = Callable[[object, str, Callable], None]


def after(change: Callable) -> Callable:
    """A wrapper that hands a function's result to `change`."""

    def wrap(function: Callable) -> Callable:
        return lambda *arguments, **named: change(function(*arguments, **named))

    return wrap


def siblings_see_each_other(patch: Patch) -> None:
    def wrap(inputs: Callable) -> Callable:
        def make(**fields: object) -> object:
            mask = fields["tail_mask"]
            everything_before = torch.ones(mask.shape[1:], dtype=torch.bool).tril()
            return inputs(**{**fields, "tail_mask": everything_before.expand_as(mask).contiguous()})

        return make

    patch(verify_module, "AttentionInputs", wrap)


def nodes_stand_at_their_number(patch: Patch) -> None:
    def change(nodes):
        count = nodes.allowed.shape[1]
        first = nodes.positions.view(-1, count)[:, :1]
        return replace(nodes, positions=(first + torch.arange(count, dtype=torch.int32)).flatten().contiguous())

    patch(verify_module, "verify_inputs", after(change))


def slots_of_accepted_nodes_are_not_moved(patch: Patch) -> None:
    patch(commit_module, "permute_tail_reference", lambda function: lambda *arguments: None)


def cache_of_the_last_node_is_lost(patch: Patch) -> None:
    def change(nodes):
        slots = nodes.out_slots.clone().view(nodes.allowed.shape)
        slots[:, 1] = 0
        return replace(nodes, out_slots=slots.flatten())

    patch(verify_module, "verify_inputs", after(change))


def noise_of_the_nodes_is_of_the_place_before(patch: Patch) -> None:
    def wrap(choose: Callable) -> Callable:
        def shifted(logits, sampling, position):
            return choose(logits, sampling, position - (torch.arange(len(position)) % sampling.repeats > 0).int())

        return shifted

    patch(verify_module, "choose_tokens", wrap)


def noise_of_every_step_is_of_the_place_before(patch: Patch) -> None:
    """Hits the run without a draft just the same: only the target's own choice shows it."""
    patch(verify_module, "choose_tokens", lambda choose: lambda logits, sampling, position: choose(logits, sampling, position - 1))


def bonus_token_is_dropped(patch: Patch) -> None:
    def wrap(add: Callable) -> Callable:
        def drop(self, rows, record, is_verify):
            if is_verify:
                record = record.copy()
                record[:, -2] -= (record[:, -3] > 0) & (record[:, -2] > 1)
            return add(self, rows, record, is_verify)

        return drop

    patch(OutputBuffers, "add", wrap)


def draft_is_not_extended(patch: Patch) -> None:
    patch(EagleDrafter, "extend", lambda function: lambda *arguments: None)


def hidden_state_is_of_the_token_before(patch: Patch) -> None:
    def wrap(keep: Callable) -> Callable:
        return lambda head, feedback, last, *rest: keep(head, feedback.roll(1, 0), last, *rest)

    patch(draft_module, "keep_last", wrap)


def draft_steps_stand_one_further(patch: Patch) -> None:
    patch(draft_module, "draft_step_inputs", after(lambda places: replace(places, positions=places.positions + 1)))


def extend_stands_one_further(patch: Patch) -> None:
    patch(extend_module, "create_extend_spec_info", after(lambda info: replace(info, positions=info.positions + 1)))


def extended_features_are_of_the_node_before(patch: Patch) -> None:
    def change(info):
        return replace(info, feature_index=(info.feature_index - 1).clamp(min=0))

    patch(extend_module, "create_extend_spec_info", after(change))


def extended_features_are_of_another_row(patch: Patch) -> None:
    def wrap(create: Callable) -> Callable:
        def exchange(tokens, extend_lens, base_lengths, rows, slot_table, path, num_nodes):
            info = create(tokens, extend_lens, base_lengths, rows, slot_table, path, num_nodes)
            return replace(info, feature_index=(info.feature_index + num_nodes) % (len(rows) * num_nodes))

        return exchange

    patch(extend_module, "create_extend_spec_info", wrap)


def accepted_tokens_keep_the_cache_of_the_tree(patch: Patch) -> None:
    """What the draft's steps left in the slots is never written over, but for the last token."""

    def change(info):
        slots = torch.zeros_like(info.out_slots)
        slots[info.last_index] = info.out_slots[info.last_index]
        return replace(info, out_slots=slots)

    patch(extend_module, "create_extend_spec_info", after(change))


def bonus_token_is_not_extended(patch: Patch) -> None:
    def wrap(create: Callable) -> Callable:
        return lambda tokens, lens, *rest: create(tokens, torch.where(lens > 1, lens - 1, lens), *rest)

    patch(extend_module, "create_extend_spec_info", wrap)


def draft_ids_are_mapped_one_off(patch: Patch) -> None:
    def wrap(topk: Callable) -> Callable:
        def off(logits, k, sampling, position, token_map, *rest):
            return topk(logits, k, sampling, position, token_map.roll(1), *rest)

        return off

    patch(draft_module, "draft_topk", wrap)


def draft_noise_is_of_the_place_before(patch: Patch) -> None:
    def wrap(topk: Callable) -> Callable:
        return lambda logits, k, sampling, position, *rest: topk(logits, k, sampling, position - 1, *rest)

    patch(draft_module, "draft_topk", wrap)


def prompt_is_not_shifted_for_the_draft(patch: Patch) -> None:
    patch(prefill_module, "view_batch", after(lambda packed: replace(packed, next_ids=packed.input_ids)))


def first_token_is_not_told_to_the_draft(patch: Patch) -> None:
    """The draft sees token 0 behind the prompt (B19 of the known failures)."""

    def wrap(extend: Callable) -> Callable:
        def forget(self, batch, attention, next_ids, features, last_index):
            return extend(self, batch, attention, next_ids.index_fill(0, last_index, 0), features, last_index)

        return forget

    patch(EagleDrafter, "extend_prompt", wrap)


def tree_steps_do_not_see_their_parents(patch: Patch) -> None:
    def change(places):
        own = torch.zeros_like(places.tail_mask)
        count, width = own.shape[1:]
        own[:, torch.arange(count), width - count + torch.arange(count)] = True
        return replace(places, tail_mask=own)

    patch(draft_module, "draft_step_inputs", after(change))


def tree_steps_see_all_branches(patch: Patch) -> None:
    patch(draft_module, "draft_step_inputs", after(lambda places: replace(places, tail_mask=torch.ones_like(places.tail_mask))))


def cache_of_tree_steps_is_lost(patch: Patch) -> None:
    patch(draft_module, "draft_step_inputs", after(lambda places: replace(places, out_slots=torch.zeros_like(places.out_slots))))


def tree_steps_continue_another_beam(patch: Patch) -> None:
    def wrap(make: Callable) -> Callable:
        def exchange(step, *rest):
            places = make(step, *rest)
            if step == 1:
                return places
            return replace(places, hidden_index=places.hidden_index.view(-1, TREE[1]).flip(1).flatten().contiguous())

        return exchange

    patch(draft_module, "draft_step_inputs", wrap)


FAULTS = {
    "twin": [
        siblings_see_each_other,
        nodes_stand_at_their_number,
        slots_of_accepted_nodes_are_not_moved,
        cache_of_the_last_node_is_lost,
        noise_of_the_nodes_is_of_the_place_before,
        noise_of_every_step_is_of_the_place_before,
        bonus_token_is_dropped,
        draft_is_not_extended,
        hidden_state_is_of_the_token_before,
        draft_steps_stand_one_further,
        extend_stands_one_further,
        extended_features_are_of_the_node_before,
        extended_features_are_of_another_row,
        accepted_tokens_keep_the_cache_of_the_tree,
        bonus_token_is_not_extended,
        draft_noise_is_of_the_place_before,
        prompt_is_not_shifted_for_the_draft,
        first_token_is_not_told_to_the_draft,
        tree_steps_see_all_branches,
        cache_of_tree_steps_is_lost,
    ],
    "e3": [draft_ids_are_mapped_one_off, tree_steps_continue_another_beam],
}
IN_BOTH_RUNS = (noise_of_every_step_is_of_the_place_before,)


@pytest.fixture(scope="module")
def plain(request):
    """Completions without a draft, by pair, made when they are first asked for."""
    return functools.cache(lambda name: generate(request.getfixturevalue(name), None))


@pytest.mark.parametrize("name", FAULTS)
def test_without_a_fault_nothing_is_found(name, plain, request):
    pair = request.getfixturevalue(name)
    found = examined(pair, TREE, plain(name), generate(pair, TREE))
    assert found.is_good and not found.differences
    assert found.num_equal == found.num_texts == 10
    assert found.found_by_depth == found.expected_by_depth and found.found_by_depth[0] > 20


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_a_fault_is_found(name, fault, plain, request, monkeypatch):
    pair, without = request.getfixturevalue(name), plain(name)
    fault(lambda owner, attribute, wrap: monkeypatch.setattr(owner, attribute, wrap(getattr(owner, attribute))))
    if fault in IN_BOTH_RUNS:
        without = generate(pair, None)
    found = examined(pair, TREE, without, generate(pair, TREE))
    assert not found.is_good


def test_a_faint_fault_is_found_with_half_the_default_sample(twin, monkeypatch):
    """TWIN's draft looks at the whole text; one key more or less hardly counts."""
    size, triple = Size(DEFAULT_PROMPTS // 2, DEFAULT_NEW_TOKENS), (5, 3, 14)
    without = generate(twin, None, size)
    tree_steps_do_not_see_their_parents(lambda owner, name, wrap: monkeypatch.setattr(owner, name, wrap(getattr(owner, name))))
    assert examined(twin, triple, without, generate(twin, triple, size)).count("bug", "acceptance") >= 2
