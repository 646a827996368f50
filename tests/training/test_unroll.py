"""The unrolled draft against what users run: the exported checkpoint, one chain at a time, through models/eagle3.py."""

import pytest
import torch

from eaglecli.models.draft_loader import load_draft
from eaglecli.training.draft_loss import Labels, draft_loss
from eaglecli.training.draft_module import DraftModule
from eaglecli.training.export import export_draft
from eaglecli.training.packed_attention import Documents, merge_own, own_gradients, unrolled_attention, unrolled_attention_reference
from eaglecli.training.packing import make_batch, pack
from eaglecli.training.session import draft_shape
from eaglecli.training.target_states import FrozenTarget
from eaglecli.training.trainer import run_draft
from eaglecli.training.vocabulary import choose_vocabulary, count_answer_tokens
from tests.helpers import new_kv_cache, packed_inputs, scattered_slot_table
from tests.training.parts import SEQUENCE_LENGTH, TAPS, load_e3, random_documents, small_settings

NUM_STEPS = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, a random draft exported in float32 and loaded again, and one packed batch with its states and unroll."""
    folder = tmp_path_factory.mktemp("unroll")
    target = load_e3(folder / "pair")
    documents = random_documents(5)
    vocabulary = choose_vocabulary(count_answer_tokens(documents, target.config.vocab_size), 96)
    module = DraftModule(draft_shape(target, small_settings()))
    feature_rms = torch.linspace(0.3, 3.0, module.shape.fused_size)
    module.initialise(target.model, vocabulary.token_ids, feature_rms, seed=3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 5.0 if parameter.dim() == 2 and name != "head" else 1.0
            parameter.mul_(scale)
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    export_draft(folder / "draft", module, vocabulary, target.config, torch.float32)
    draft = load_draft(folder / "draft", target, torch.float32, "cpu", 128).model
    batch = make_batch(documents, pack(documents, SEQUENCE_LENGTH), SEQUENCE_LENGTH, NUM_STEPS, torch.device("cpu"))
    states = FrozenTarget(target.model, TAPS).run(batch)
    cuts = Documents(batch.starts, batch.max_document_len)
    unrolled = module.unroll(states.features, batch.input_ids, batch.positions, cuts, target.model.embed_weight, NUM_STEPS)
    return target, documents, vocabulary, module, draft, batch, states, unrolled


def naive_chain(draft, token_ids, features, start):
    """Feedback and logits of steps 0.. of a chain that starts at slot `start` of one document, every forward on its own."""
    cache = new_kv_cache(1, 256, draft.num_kv_heads, draft.head_dim)
    table = scattered_slot_table(1, 128)
    first = packed_inputs(table, [0], [start + 1])
    output = draft.forward(token_ids[1 : start + 2], draft.fuse(features[: start + 1]), first.positions, cache, first)
    results = [(output.feedback[-1:], draft.logits(output.head_input[-1:]))]
    for step in range(1, NUM_STEPS):
        slot = start + step
        inputs = packed_inputs(table, [slot], [1])
        output = draft.forward(token_ids[slot + 1 : slot + 2], results[-1][0], inputs.positions, cache, inputs)
        results.append((output.feedback, draft.logits(output.head_input)))
    return results


def test_every_index_of_the_unroll_is_a_chain_of_the_exported_draft(world):
    target, _, _, module, draft, batch, states, unrolled = world
    checked = 0
    for start, end in zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True):
        if int(batch.input_ids[start:end].max()) == 0:
            continue  # padding
        token_ids, features = batch.input_ids[start:end], states.features[start:end]
        for index in range(end - start - NUM_STEPS):
            for step, (feedback, logits) in enumerate(naive_chain(draft, token_ids, features, index)):
                torch.testing.assert_close(unrolled.feedback[step][start + index][None], feedback, rtol=1e-4, atol=1e-4)
                ours = unrolled.normed[step][start + index][None] @ module.head.T
                torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
                checked += 1
    assert checked > 100


def test_a_document_does_not_see_its_neighbours(world):
    target, documents, _, module, _, _, _, _ = world
    lone, pair = ([documents[0]], [documents[1], documents[0]])
    results = []
    for some in (lone, pair):
        batch = make_batch(some, [list(range(len(some)))], SEQUENCE_LENGTH, NUM_STEPS, torch.device("cpu"))
        states = FrozenTarget(target.model, TAPS).run(batch)
        cuts = Documents(batch.starts, batch.max_document_len)
        unrolled = module.unroll(states.features, batch.input_ids, batch.positions, cuts, target.model.embed_weight, NUM_STEPS)
        start = sum(len(document) for document in some[:-1])
        inside = slice(start, start + len(documents[0]) - NUM_STEPS)
        results.append([states.hidden[inside], *(output[inside] for output in unrolled.feedback)])
    for alone, beside in zip(*results, strict=True):
        torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-5)


def naive_loss(world, decay):
    """The definition, label by label, in float64."""
    target, documents, vocabulary, module, _, batch, states, unrolled = world
    token_ids, total = vocabulary.token_ids, torch.zeros((), dtype=torch.float64)
    target_logits = states.hidden.double() @ target.model.head_weight.double().T
    for start, document in placed(batch, documents):
        for step in range(NUM_STEPS):
            for index in range(document.answer_start - 1, len(document) - step - 2):
                label_row = start + index + step + 1
                if not (token_ids == target_logits[label_row].argmax()).any():
                    continue
                label = target_logits[label_row, token_ids].softmax(-1)
                logits = unrolled.normed[step][start + index].double() @ module.head.double().T
                total -= decay**step * (label * logits.log_softmax(-1)).sum()
    return total / batch.num_positions


def placed(batch, documents):
    """(start in the batch, document) by comparing tokens."""
    for start, end in zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True):
        ids = batch.input_ids[start:end].tolist()
        for document in documents:
            if ids == document.token_ids.tolist():
                yield start, document


def test_the_loss_and_its_gradient_follow_the_definition(world, monkeypatch):
    target, documents, vocabulary, module, _, batch, _, _ = world
    assert len(list(placed(batch, documents))) == len(documents)
    monkeypatch.setattr("eaglecli.training.draft_loss._PIECE_ELEMENTS", 96 * NUM_STEPS * 7)  # pieces of seven rows
    expected = naive_loss(world, 0.8)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(expected, parameters, retain_graph=True)
    result = run_draft(module, FrozenTarget(target.model, TAPS), batch, vocabulary.token_ids, 0.8, batch.num_positions)
    torch.testing.assert_close(result.loss.double(), expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(result.loss, parameters), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_sharper_labels_are_the_target_at_a_lower_temperature(world):
    target, _, vocabulary, module, _, batch, states, unrolled = world
    head = target.model.head_weight
    parts = (vocabulary.token_ids, batch.label_rows, batch.is_drafted)
    sharp = draft_loss(unrolled.normed, module.head, Labels(states.hidden, head, *parts, temperature=0.5), 1.0, 1).loss
    doubled = draft_loss(unrolled.normed, module.head, Labels(2.0 * states.hidden, head, *parts), 1.0, 1).loss
    plain = draft_loss(unrolled.normed, module.head, Labels(states.hidden, head, *parts), 1.0, 1).loss
    torch.testing.assert_close(sharp, doubled)
    assert not torch.isclose(sharp, plain)


def test_labels_reach_the_end_token_and_begin_with_the_answer(world):
    _, documents, _, _, _, batch, _, _ = world
    rows = set(batch.label_rows.tolist())
    for start, document in placed(batch, documents):
        assert start + len(document) - 2 in rows, "the row that predicts the end token has no label"
        assert start + len(document) - 1 not in rows, "the end token predicts something"
        assert start + document.answer_start - 2 not in rows, "a prompt token is predicted"
    drafted = batch.is_drafted.sum(1).tolist()
    answer_lens = [len(document.answer_ids) for document in documents]
    assert drafted == [sum(max(0, length - step - 1) for length in answer_lens) for step in range(NUM_STEPS)]


def test_hits_are_first_choices_that_the_target_shares(world):
    target, documents, vocabulary, module, _, batch, states, unrolled = world
    labels = Labels(states.hidden, target.model.head_weight, vocabulary.token_ids, batch.label_rows, batch.is_drafted)
    is_hit = draft_loss(unrolled.normed, module.head, labels, 1.0, 1).is_hit
    choice = (states.hidden @ target.model.head_weight.T).argmax(-1)
    for step in range(NUM_STEPS):
        index = batch.label_rows - step - 1
        ours = vocabulary.token_ids[(unrolled.normed[step] @ module.head.T).argmax(-1)]
        expected = (ours[index] == choice[batch.label_rows]) & batch.is_drafted[step]
        assert torch.equal(is_hit[step], expected)


def test_own_keys_are_merged_in_forward_and_backward_as_one_softmax():
    """The flash path with its causal part written out: told the merged output and log-sum-exp, its formulas give the whole gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 4, 8), (12, 2, 8), (12, 2, 8), (2, 12, 2, 8), (2, 12, 2, 8)]
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    q, keys, values, own_keys, own_values = parts
    wanted_out = unrolled_attention_reference(*parts, Documents(torch.tensor([0, 5, 12], dtype=torch.int32), 7), 0.5)
    grad_out = torch.randn(wanted_out.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(wanted_out, parts, grad_out)
    with torch.no_grad():
        per_head = [tensor.repeat_interleave(2, 1) for tensor in (keys, values)]
        row = torch.arange(12)
        visible = (row[:, None] >= row) & ((row[:, None] >= 5) == (row >= 5))
        scores = torch.einsum("ihd,jhd->hij", q, per_head[0]).mul(0.5).masked_fill(~visible, -torch.inf)
        causal_out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), per_head[1])
        out, lse = merge_own(q, own_keys, own_values, causal_out, scores.logsumexp(-1), 0.5)
        torch.testing.assert_close(out, wanted_out, rtol=1e-5, atol=1e-5)
        weights = (scores - lse[..., None]).exp()
        grad_weights = torch.einsum("ihd,jhd->hij", grad_out, per_head[1]) - (grad_out * out).sum(-1).t()[..., None]
        grad_scores = weights * grad_weights * 0.5
        own_q, grad_own_keys, grad_own_values = own_gradients(q, own_keys, own_values, out, lse, grad_out, 0.5)
        found = (
            torch.einsum("hij,jhd->ihd", grad_scores, per_head[0]) + own_q,
            torch.einsum("hij,ihd->jhd", grad_scores, q).unflatten(1, (2, 2)).sum(2),
            torch.einsum("hij,ihd->jhd", weights, grad_out).unflatten(1, (2, 2)).sum(2),
            grad_own_keys,
            grad_own_values,
        )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_own", [0, 3])
def test_flash_attention_and_own_keys_equal_the_plain_form(num_own):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(96, 9, 64), (96, 3, 64), (96, 3, 64), (num_own, 96, 3, 64), (num_own, 96, 3, 64)]
    exact = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).bfloat16().double().requires_grad_() for shape in shapes
    ]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    cuts = Documents(torch.tensor([0, 40, 41, 96], dtype=torch.int32, device="cuda"), 55)
    wanted = unrolled_attention_reference(*exact, cuts, 0.125).flatten(1)
    found = unrolled_attention(*rounded, cuts, 0.125)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
    grad_out = torch.randn(wanted.shape, generator=generator, device="cuda", dtype=torch.float64).bfloat16()
    inputs = 5 if num_own else 3
    ours = torch.autograd.grad(found, rounded[:inputs], grad_out)
    theirs = torch.autograd.grad(wanted, exact[:inputs], grad_out.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=3e-2, atol=5e-2)
