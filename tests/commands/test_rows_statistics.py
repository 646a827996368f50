"""Rows STATS of the known failures: what is printed and written about acceptance can be reproduced from the lines."""

import json

import pytest

from tests.commands.program import Program, write_records
from tests.fixtures import disjoint_cycles, text_cycle, write_cycle, write_rand

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("letters"), [text_cycle(LETTERS)])


@pytest.fixture(scope="module")
def rand(tmp_path_factory):
    return write_rand(tmp_path_factory.mktemp("rand"))


def run(pair, folder, records, *options):
    program = Program(pair, write_records(folder / "input.jsonl", records), folder / "run")
    done = program.run(*options)
    assert done.exit_code == 0, done.output
    return program, done


def ratio(above: float, below: float):
    return pytest.approx(above / below)


def test_the_accept_length_is_6_where_all_is_right_and_about_1_where_nothing_is(letters, rand, tmp_path):
    """B62: 61 tokens are the prefill's and 60 of ten steps; the definition is printed beside the value; drafted is not accepted."""
    chain = ("--num-speculative-tokens", "5", "--max-new-tokens", "61")
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    right, said = run(letters, tmp_path / "right", [{"prompt_token_ids": [97]}], *chain)
    assert "accept length 6.000 ((accepted + steps) / steps), 10 verify steps" in said.stderr
    (line,) = right.lines()
    spec = line["spec"]
    assert (spec["spec_num_proposed_drafts"], spec["spec_num_correct_drafts"], spec["spec_verify_ct"]) == (50, 50, 10)
    assert right.document("stats.json")["accept"]["accept_length"] == spec["accept_length"] == 6.0
    wrong, _ = run(rand, tmp_path / "wrong", [{"prompt_token_ids": [number]} for number in range(8)], *chain)
    stats = wrong.document("stats.json")["accept"]
    assert 1.0 <= stats["accept_length"] < 1.5
    assert stats["spec_num_proposed_drafts"] == 5 * stats["spec_verify_ct"] > 50 * stats["spec_num_correct_drafts"] / 5
    assert all(1.0 <= line["spec"]["accept_length"] <= 6.0 for line in wrong.lines())


def test_what_steps_emit_and_the_prefill_token_make_the_output(letters, tmp_path):
    """B63: ends as ids and as strings at places 1 to 6, caps of 1 to 7; what the last step threw away is counted apart."""
    records = [
        {"prompt_token_ids": [ord("z")], "max_new_tokens": cap, **stop}
        for place in range(1, 7)
        for cap in range(1, 8)
        for stop in ({"stop_token_ids": [ord(LETTERS[place])]}, {"stop": LETTERS[place]})
    ]
    program, _ = run(letters, tmp_path, records, "--num-speculative-tokens", "5")
    found = program.lines()
    assert len(found) == 84
    for line, record in zip(found, records, strict=True):
        spec, histogram = line["spec"], line["spec"]["spec_correct_drafts_histogram"]
        end = ord(record["stop"]) if "stop" in record else record["stop_token_ids"][0]
        tokens = min(record["max_new_tokens"], end - ord("a") + 1)
        emitted = sum(steps * (accepted + 1) for accepted, steps in enumerate(histogram)) - spec["spec_num_cut_tokens"]
        assert line["usage"]["completion_tokens"] == len(line["token_ids"]) == tokens == 1 + emitted
        assert sum(histogram) == spec["spec_verify_ct"] == (tokens > 1)
        assert line["finish_reason"] == ("stop" if line["token_ids"][-1] == end else "length")
    stats = program.document("stats.json")
    assert stats["accept"]["identity"] == {"holds": True, "num_violations": 0}
    assert stats["accept"]["spec_num_cut_tokens"] == sum(line["spec"]["spec_num_cut_tokens"] for line in found) > 0
    assert stats["counts"]["total_output_tokens"] == sum(len(line["token_ids"]) for line in found)


def test_every_ratio_of_a_tree_follows_from_the_counts_of_the_lines(rand, tmp_path):
    """B65: depth 5, branches 4, 16 nodes; nodes proposed are those but the root; rates never rise with the position."""
    records = [{"prompt_token_ids": cycle, "temperature": 0.5 * (number % 2)} for number, cycle in enumerate(disjoint_cycles(8))]
    tree = ("--speculative-num-steps", "5", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16")
    program, _ = run(rand, tmp_path, records, *tree, "--max-new-tokens", "40")
    specs = [line["spec"] for line in program.lines()]
    for line, spec in zip(program.lines(), specs, strict=True):
        steps, accepted, proposed = (spec[name] for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts"))
        histogram = spec["spec_correct_drafts_histogram"]
        assert proposed == 15 * steps
        assert spec["accept_length"] == ratio(accepted + steps, steps)
        assert spec["spec_accept_length"] == ratio(line["usage"]["completion_tokens"], steps)
        assert spec["spec_accept_rate"] == ratio(accepted, proposed)
        assert spec["depth_accept_rate"] == ratio(accepted, 5 * steps)
        assert accepted == sum(count * number for count, number in enumerate(histogram))
        rates = spec["accept_rate_per_position"]
        assert rates == [ratio(sum(histogram[depth:]), steps) for depth in range(1, 6)] == sorted(rates, reverse=True)
    total = json.loads((program.output / "stats.json").read_text())["accept"]
    for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_num_cut_tokens"):
        assert total[name] == sum(spec[name] for spec in specs)
    assert total["accept_length"] == ratio(total["spec_num_correct_drafts"] + total["spec_verify_ct"], total["spec_verify_ct"])
    assert total["spec_accept_rate"] == ratio(total["spec_num_correct_drafts"], 15 * total["spec_verify_ct"])
    assert total["depth_accept_rate"] == ratio(total["spec_num_correct_drafts"], 5 * total["spec_verify_ct"])
    assert total["accept_rate_per_position"] == sorted(total["accept_rate_per_position"], reverse=True)
    assert total["spec_num_correct_drafts"] > 0
