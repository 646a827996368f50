"""`eaglecli generate` as a whole, in process: files in; files, messages and exit codes out. The models are the CYCLE pair."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from eaglecli.cli import app
from eaglecli.engine.request import Completion
from eaglecli.errors import ExitCode, UserError
from tests.commands.program import Program, ScriptedModels, answered, lines, scripted_run, write_records
from tests.fixtures import END_OF_TURN_ID, disjoint_cycles, text_cycle, write_cycle

MESSY = Path(__file__).parent.parent / "data" / "messy"
CYCLE_OF = {token: cycle for cycle in disjoint_cycles() for token in cycle}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture
def invoke(pair, tmp_path):
    """Runs `generate` on the CYCLE target with a prompt file made of the given records (or an existing file)."""

    def call(records, *arguments, draft=True, output=tmp_path / "run"):
        source = records if isinstance(records, Path) else tmp_path / "input.jsonl"
        if not isinstance(records, Path):
            source.write_text("".join(json.dumps(record) + "\n" for record in records))
        models = ["--target", str(pair.target_dir), *(["--draft", str(pair.draft_dir)] if draft else [])]
        common = ["-i", str(source), "-o", str(output), "--device", "cpu", "--context-length", "512"]
        return CliRunner().invoke(app, ["generate", *models, *common, *arguments])

    return call


def expected_ids(last: int, count: int) -> list[int]:
    """CYCLE goes on from the prompt's last token through its cycle."""
    cycle = CYCLE_OF[last]
    start = cycle.index(last) + 1
    return [cycle[(start + step) % len(cycle)] for step in range(count)]


LAST_OF_TEMPLATE = ord("\n")


def test_a_run_writes_answers_statistics_and_manifest(invoke, tmp_path):
    done = invoke([{"id": 1, "prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}], "--max-new-tokens", "61")
    assert done.exit_code == 0, done.output
    first, second = lines(tmp_path / "run" / "generations.jsonl")
    assert first["token_ids"] == expected_ids(LAST_OF_TEMPLATE, 61)
    assert first["text"] == bytes(first["token_ids"]).decode()
    assert (first["id"], second["id"], second["index"], second["line"], second["sample"]) == (1, "record-1", 1, 2, 0)
    assert first["usage"] == {"prompt_tokens": len("<user\na>\n<assistant\n"), "completion_tokens": 61}
    assert first["finish_reason"] == "length"
    assert set(first["timing"]) == {"queue_s", "ttft_s", "e2e_s"}
    assert lines(tmp_path / "run" / "errors.jsonl") == []
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["status"], manifest["exit_code"]) == ("complete", 0)
    assert manifest["settings"]["max_new_tokens"] == {"value": 61, "origin": "command line"}
    assert manifest["settings"]["dtype"] == {"value": "float32", "origin": "derived"}
    assert "2 done, 0 failed" in (tmp_path / "run" / "log.txt").read_text()


def test_cycle_accepts_all_drafts_and_every_formula_says_so(invoke, tmp_path):
    assert invoke([{"prompt": "a"}], "--max-new-tokens", "61", "--num_speculative_tokens", "5").exit_code == 0
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["accept"]["accept_length"] == 6.0
    assert stats["accept"]["spec_correct_drafts_histogram"] == [0, 0, 0, 0, 0, 10]
    assert stats["accept"]["identity"] == {"holds": True, "num_violations": 0}
    (line,) = lines(tmp_path / "run" / "generations.jsonl")
    spec = line["spec"]
    cut = spec["spec_num_cut_tokens"]
    assert line["usage"]["completion_tokens"] == 1 + spec["spec_num_correct_drafts"] + spec["spec_verify_ct"] - cut
    assert stats["definitions"]["accept_length"].startswith("(sum A + sum V) / sum V")


def test_without_a_draft_the_text_is_the_same_and_spec_is_null(invoke, tmp_path):
    records = [{"prompt": text} for text in ("a", "bc", "d")]
    assert invoke(records, "--max-new-tokens", "9").exit_code == 0
    assert invoke(records, "--max-new-tokens", "9", draft=False, output=tmp_path / "plain").exit_code == 0
    drafted, plain = lines(tmp_path / "run" / "generations.jsonl"), lines(tmp_path / "plain" / "generations.jsonl")
    assert [line["token_ids"] for line in drafted] == [line["token_ids"] for line in plain]
    assert all(line["spec"] is None for line in plain)
    assert json.loads((tmp_path / "plain" / "stats.json").read_text())["accept"] is None


def test_results_come_back_in_input_order_with_their_own_text(invoke, tmp_path):
    records = [{"id": number, "prompt": chr(33 + number), "max_new_tokens": 1 + (number * 7) % 40} for number in range(30)]
    done = invoke(records, "--no-apply-chat-template", "--max-running-requests", "4")
    assert done.exit_code == 0, done.output
    written = lines(tmp_path / "run" / "generations.jsonl")
    assert [line["id"] for line in written] == list(range(30))
    for number, line in enumerate(written):
        assert line["token_ids"] == expected_ids(33 + number, 1 + (number * 7) % 40)


def test_record_options_win_and_the_stop_token_ends_the_answer(invoke, tmp_path):
    stop = expected_ids(ord("a"), 4)[3]
    records = [{"prompt": "a", "stop_token_ids": [stop]}, {"prompt": "a", "max_new_tokens": 2, "temperature": 0.5, "seed": 3}]
    assert invoke(records, "--no-apply-chat-template", "--max-new-tokens", "20").exit_code == 0
    first, second = lines(tmp_path / "run" / "generations.jsonl")
    assert (first["finish_reason"], first["stop_reason"], len(first["token_ids"])) == ("stop", stop, 4)
    assert first["text"] == bytes(first["token_ids"][:-1]).decode()
    assert (second["seed"], len(second["token_ids"])) == (3, 2)


def test_a_record_that_asks_for_temperature_0_is_greedy_in_a_sampled_run(invoke, tmp_path):
    records = [{"prompt": "a", "temperature": 0}, {"prompt": "a"}]
    assert invoke(records, "--no-apply-chat-template", "--temperature", "40", "--max-new-tokens", "8").exit_code == 0
    greedy, sampled = (line["token_ids"] for line in lines(tmp_path / "run" / "generations.jsonl"))
    assert greedy == expected_ids(ord("a"), 8)
    assert sampled != greedy


def test_bad_records_are_set_aside_and_the_others_finish(invoke, tmp_path):
    records = [
        {"id": "good", "prompt": "a"},
        {"id": "empty", "prompt": " "},
        {"id": "option", "prompt": "a", "temperature": "hot"},
        {"id": "known", "prompt": "a", "stop_regex": "x"},
        {"id": "long", "prompt": "a" * 600},
        {"id": "cap", "prompt": "a", "max_new_tokens": 510},
        {"id": "last", "prompt": "b"},
    ]
    done = invoke(records, "--max-new-tokens", "5")
    assert done.exit_code == ExitCode.PARTIAL
    assert [line["id"] for line in lines(tmp_path / "run" / "generations.jsonl")] == ["good", "last"]
    errors = {line["id"]: line for line in lines(tmp_path / "run" / "errors.jsonl")}
    codes = {name: line["code"] for name, line in errors.items()}
    assert codes == {"empty": "empty_prompt", "option": "bad_option", "known": "unsupported", "long": "too_long", "cap": "too_long"}
    assert list(errors) == ["empty", "option", "known", "long", "cap"]
    assert "510" in errors["cap"]["message"]
    assert "512" in errors["cap"]["message"]
    assert errors["long"]["line"] == 5
    assert "5 failed" in done.stderr


def test_a_cap_that_was_not_given_shrinks_to_the_room_left(invoke, tmp_path):
    assert invoke([{"prompt": "a" * 480}], "--no-apply-chat-template").exit_code == 0
    (line,) = lines(tmp_path / "run" / "generations.jsonl")
    assert line["usage"] == {"prompt_tokens": 480, "completion_tokens": 32}


def test_on_error_stop_names_the_line_before_anything_is_loaded(invoke, tmp_path):
    done = invoke(MESSY / "malformed_middle.jsonl", "--on-error", "stop")
    assert done.exit_code == ExitCode.USAGE
    assert "line 3" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["empty_file.jsonl", "only_bom_and_blanks.jsonl", "duplicate_keys.jsonl"])
def test_without_a_usable_record_valid_files_are_written_and_no_model_is_loaded(invoke, tmp_path, name):
    done = invoke(MESSY / name, "--target", "no-such-model")
    assert done.exit_code == ExitCode.NOTHING_DONE
    assert (tmp_path / "run" / "generations.jsonl").read_bytes() == b""
    assert len(lines(tmp_path / "run" / "errors.jsonl")) == (2 if name.startswith("duplicate") else 0)
    assert json.loads((tmp_path / "run" / "stats.json").read_text())["throughput"]["output_throughput"] is None


def test_messy_text_is_generated_for_and_written_back(invoke, tmp_path):
    for name in ("line_separators_in_strings.jsonl", "special_token_text.jsonl", "duplicate_ids.jsonl", "odd_ids.jsonl"):
        output = tmp_path / name
        done = invoke(MESSY / name, "--max-new-tokens", "3", output=output.with_suffix(""))
        assert done.exit_code == 0, done.output
        written = lines(output.with_suffix("") / "generations.jsonl")
        assert [line["index"] for line in written] == list(range(len(written)))
    assert "lines 1, 3, 4" in (tmp_path / "duplicate_ids" / "log.txt").read_text()


def test_sampled_text_depends_on_the_record_and_not_on_its_neighbours(invoke, tmp_path):
    records = [{"id": number, "prompt": f"{number}", "temperature": 40.0} for number in range(6)]
    assert invoke(records, "--max-new-tokens", "8").exit_code == 0
    assert invoke(records[::-1], "--max-new-tokens", "8", "--max-running-requests", "2", output=tmp_path / "back").exit_code == 0
    assert invoke(records, "--max-new-tokens", "8", "--seed", "1", output=tmp_path / "other").exit_code == 0
    forward, back, other = (
        {line["id"]: line["token_ids"] for line in lines(tmp_path / name / "generations.jsonl")} for name in ("run", "back", "other")
    )
    assert forward == back
    assert forward != other
    assert len({tuple(ids) for ids in forward.values()}) > 1


def test_a_model_that_is_not_there_is_one_sentence_and_code_5(invoke, tmp_path):
    done = invoke([{"prompt": "a"}], "--target", str(tmp_path / "absent"))
    assert done.exit_code == ExitCode.MODEL
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_earlier_run_is_kept_unless_overwrite_is_asked_for(invoke, tmp_path):
    assert invoke([{"prompt": "a"}], "--max-new-tokens", "2").exit_code == 0
    refused = invoke([{"prompt": "b"}], "--max-new-tokens", "3")
    assert (refused.exit_code, "--overwrite" in refused.stderr) == (ExitCode.USAGE, True)
    assert invoke([{"prompt": "b"}], "--max-new-tokens", "3", "--overwrite").exit_code == 0
    (line,) = lines(tmp_path / "run" / "generations.jsonl")
    assert len(line["token_ids"]) == 3


def test_standard_output_is_empty_or_one_json_object(invoke, tmp_path):
    assert invoke([{"prompt": "a"}], "--max-new-tokens", "2").stdout == ""
    done = invoke([{"prompt": "a"}], "--max-new-tokens", "2", "--json", output=tmp_path / "json")
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["exit_code"], document["status"]) == (1, 0, "complete")


def test_stop_token_ids_can_be_repeated_and_joined(invoke, tmp_path):
    given = ["--stop-token-ids", "1,2", "--stop-token-ids", "5"]
    assert invoke([{"prompt": "a"}], "--max-new-tokens", "2", *given).exit_code == 0
    recorded = json.loads((tmp_path / "run" / "manifest.json").read_text())["settings"]
    assert recorded["stop_token_ids"] == {"value": [1, 2, 5], "origin": "command line"}


def test_quiet_says_nothing_on_success(invoke):
    done = invoke([{"prompt": "a"}], "--max-new-tokens", "2", "-q")
    assert (done.exit_code, done.output) == (0, "")


def test_underscores_and_other_tools_names_are_understood(invoke, tmp_path):
    assert invoke([{"prompt": "a"}], "--max_tokens", "2", "--top_p", "0.5", "--seed", "4").exit_code == 0
    recorded = json.loads((tmp_path / "run" / "manifest.json").read_text())["settings"]
    assert [recorded[name]["value"] for name in ("max_new_tokens", "top_p", "random_seed")] == [2, 0.5, 4]


def test_print_config_shows_each_value_with_its_origin(invoke, tmp_path):
    done = invoke([{"prompt": "a"}], "--temperature", "0", "--print-config")
    assert done.exit_code == 0
    assert "temperature: 0.0  # command line" in done.stdout
    assert "top_p: 1.0  # default" in done.stdout
    assert not (tmp_path / "run").exists()


def test_the_generation_config_of_the_model_samples_unless_told_otherwise(pair, invoke, tmp_path):
    path = pair.target_dir / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.25, "eos_token_id": END_OF_TURN_ID}))
    try:
        done = invoke([{"prompt": "a"}], "--max-new-tokens", "2")
    finally:
        path.unlink()
    recorded = json.loads((tmp_path / "run" / "manifest.json").read_text())["settings"]
    assert recorded["temperature"] == {"value": 0.25, "origin": "generation_config"}
    assert "temperature 0.25" in done.stderr


def test_a_numeric_failure_spoils_its_record_alone(tmp_path, pair):
    def respond(request):
        return Completion(request, np.zeros(0, np.int32), "error", error="not finite") if request.key.index == 1 else answered(request)

    assert scripted_run(tmp_path, ScriptedModels(pair.target_dir, respond)).exit_code == ExitCode.PARTIAL
    (error,) = lines(tmp_path / "run" / "errors.jsonl")
    assert (error["index"], error["code"], error["message"]) == (1, "numeric", "not finite")


def test_finished_lines_survive_an_engine_that_fails(tmp_path, pair):
    def respond(request):
        if request.key.index == 2:
            raise RuntimeError("broken kernel")
        return answered(request)

    with pytest.raises(RuntimeError, match="broken kernel"):
        scripted_run(tmp_path, ScriptedModels(pair.target_dir, respond))
    assert len(lines(tmp_path / "run" / "generations.jsonl")) == 2
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"


def test_memory_that_runs_out_has_a_code_of_its_own(tmp_path, pair):
    def respond(request):
        raise MemoryError("no room")

    with pytest.raises(UserError) as raised:
        scripted_run(tmp_path, ScriptedModels(pair.target_dir, respond))
    assert raised.value.exit_code == ExitCode.MEMORY


def test_stop_on_error_also_holds_for_faults_that_only_tokens_show(tmp_path, pair):
    with pytest.raises(UserError, match="too_long"):
        scripted_run(tmp_path, ScriptedModels(pair.target_dir, answered), max_new_tokens=512, on_error="stop")


def test_the_program_runs_as_a_process(pair, tmp_path):
    source = tmp_path / "input.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    command = [
        "generate",
        "-i",
        str(source),
        "-o",
        str(tmp_path / "run"),
        "--target",
        str(pair.target_dir),
        "--json",
        "--max-new-tokens",
        "4",
    ]
    done = subprocess.run([sys.executable, "-m", "eaglecli", *command, "--device", "cpu"], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.PARTIAL
    assert json.loads(done.stdout)["counts"]["failed_requests"] == 1
    assert "1 records failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_text_is_that_of_all_ids_decoded_at_once_wherever_steps_end_or_the_cap_cuts(tmp_path):
    """B51, the side of the answer: characters of two to four bytes, a token a byte, steps of three bytes, every cap."""
    ids = text_cycle("é€😀ก")
    records = [{"prompt_token_ids": [120, ids[-1]], "max_new_tokens": cap} for cap in range(1, 14)]
    program = Program(write_cycle(tmp_path, [ids]), write_records(tmp_path / "input.jsonl", records), tmp_path / "run")
    assert program.run("--num-speculative-tokens", "2").exit_code == 0
    for cap, line in enumerate(program.lines(), start=1):
        expected = [ids[place % len(ids)] for place in range(cap)]
        assert line["token_ids"] == expected
        assert line["text"] == bytes(expected).decode("utf-8", errors="replace")
