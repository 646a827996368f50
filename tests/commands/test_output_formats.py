"""Further forms of the results: OpenAI batch lines and a Parquet table, made at the end."""

import json

import pyarrow.parquet
import pytest

from eaglecli.commands._open_engine import FoundModels
from eaglecli.errors import ExitCode
from tests.commands.program import Program, lines, write_records
from tests.fixtures import write_cycle

CHAT = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "a"}]}}
RAW = {"custom_id": "raw", "method": "POST", "url": "/v1/completions", "body": {"prompt": "b"}}
BAD = {"custom_id": "bad", "method": "POST", "url": "/v1/embeddings", "body": {"input": "c"}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture
def program(pair, tmp_path):
    return Program(pair, write_records(tmp_path / "input.jsonl", [CHAT, BAD, RAW]), tmp_path / "run")


def test_openai_lines_carry_the_answer_as_the_api_does(program):
    assert program.run("--output-format", "openai-batch").exit_code == ExitCode.PARTIAL
    chat, raw = program.lines("openai_batch_output.jsonl")
    answer = program.lines()[0]
    assert set(chat) == {"id", "custom_id", "response", "error"}
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("chat", None, 200)
    body = chat["response"]["body"]
    assert (body["object"], raw["response"]["body"]["object"]) == ("chat.completion", "text_completion")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": answer["text"], "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert raw["response"]["body"]["choices"][0]["text"] == program.lines()[1]["text"]
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert body["usage"] == {"prompt_tokens": prompt_tokens, "completion_tokens": 4, "total_tokens": prompt_tokens + 4}


def test_failed_requests_go_to_a_file_of_their_own(program):
    program.run("--output-format", "openai-batch")
    (failed,) = program.lines("openai_batch_errors.jsonl")
    assert (failed["custom_id"], failed["response"], failed["error"]["code"]) == ("bad", None, "unsupported")
    assert failed["error"]["message"] == program.lines("errors.jsonl")[0]["message"]


def test_openai_lines_are_in_input_order_whatever_order_the_results_have(program):
    write_records(program.source, [{"id": n, "prompt": f"{n}", "max_new_tokens": 1 + 5 * (n % 3 == 0)} for n in range(9)])
    program.run("--output-format", "openai-batch", "--unordered", "--max-running-requests", "3")
    assert [line["index"] for line in program.lines()] != list(range(9))
    assert [line["custom_id"] for line in program.lines("openai_batch_output.jsonl")] == [str(n) for n in range(9)]


def test_the_table_holds_what_the_lines_hold(program):
    write_records(program.source, [{"id": "x", "prompt": "a"}, {"id": 7, "prompt": "b"}, {"prompt": "c"}])
    program.run("--output-format", "parquet", "--keep-fields")
    rows = pyarrow.parquet.read_table(program.output / "generations.parquet").to_pylist()
    answers = program.lines()
    assert [json.loads(row["id"]) for row in rows] == ["x", 7, "record-2"]
    for name in ("index", "text", "token_ids", "finish_reason", "seed", "sample", "line"):
        assert [row[name] for row in rows] == [line[name] for line in answers]
    assert [row["completion_tokens"] for row in rows] == [4, 4, 4]
    assert [row["spec"]["spec_verify_ct"] for row in rows] == [line["spec"]["spec_verify_ct"] for line in answers]
    assert json.loads(rows[1]["input"]) == {"id": 7, "prompt": "b"}


@pytest.mark.parametrize("name", ["generations.parquet", "openai_batch_output.jsonl"])
def test_a_format_can_be_made_of_a_complete_run_without_weights(program, monkeypatch, name):
    program.run()
    assert not (program.output / name).exists()
    monkeypatch.setattr(FoundModels, "open_engine", lambda self, settings, needs: pytest.fail("weights were read"))
    output_format = "parquet" if name.endswith("parquet") else "openai-batch"
    assert program.run("--output-format", output_format).exit_code == ExitCode.PARTIAL
    assert (program.output / name).exists()


def test_an_empty_run_makes_valid_empty_files(program):
    program.source.write_text("")
    assert program.run("--output-format", "parquet").exit_code == ExitCode.NOTHING_DONE
    assert pyarrow.parquet.read_table(program.output / "generations.parquet").num_rows == 0
    assert program.run("--output-format", "openai-batch").exit_code == ExitCode.NOTHING_DONE
    assert lines(program.output / "openai_batch_output.jsonl") == []


def test_a_package_that_is_not_there_is_missed_before_the_run(program, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "pyarrow" else find_spec(name, *more))
    done = program.run("--output-format", "parquet")
    assert (done.exit_code, "pip install pyarrow" in done.stderr, program.output.exists()) == (ExitCode.USAGE, True, False)
