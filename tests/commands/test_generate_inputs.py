"""`eaglecli generate` over every input format, in process: the same conversations give the same ids and the same answers."""

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eaglecli.cli import app
from eaglecli.errors import ExitCode
from eaglecli.io.tokenizer import load_tokenizer
from tests.fixtures import disjoint_cycles, write_cycle, write_rand

QUESTIONS = [f"Question {number}: what is {number} + {number}? é" for number in range(10)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_rand(tmp_path_factory.mktemp("rand"))


@pytest.fixture
def run(pair, tmp_path):
    """Runs `generate` on the RAND target and returns (result, lines of generations.jsonl)."""

    def call(*arguments, name="run", models=None):
        target = models or ["--target", str(pair.target_dir), "--draft", str(pair.draft_dir)]
        common = ["-o", str(tmp_path / name), "--device", "cpu", "--context-length", "512", "--max-new-tokens", "6"]
        done = CliRunner().invoke(app, ["generate", *target, *common, *map(str, arguments)])
        return done, lines(tmp_path / name / "generations.jsonl")

    return call


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line] if path.is_file() else []


def jsonl(records) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def asked(text):
    return [{"role": "user", "content": text}]


def write_formats(folder: Path, tokenizer) -> dict[str, Path]:
    """The ten conversations in every format."""
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    chats = [{"custom_id": f"q{number}", "messages": asked(text)} for number, text in enumerate(QUESTIONS)]
    data = {
        "prompt.jsonl": jsonl({"prompt": text} for text in QUESTIONS),
        "messages.jsonl": jsonl(chats),
        "turns.jsonl": jsonl({"question_id": number, "turns": [text]} for number, text in enumerate(QUESTIONS)),
        "sharegpt.json": json.dumps(
            [{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "old"}]} for text in QUESTIONS]
        ).encode(),
        "alpaca.json": json.dumps([{"instruction": text, "input": "", "output": "old"} for text in QUESTIONS], indent=1).encode(),
        "batch.jsonl": jsonl(
            {"custom_id": chat["custom_id"], "method": "POST", "url": "/v1/chat/completions", "body": {"messages": chat["messages"]}}
            for chat in chats
        ),
        "tokens.jsonl": jsonl({"prompt_token_ids": tokenizer.encode_messages(asked(text)).tolist()} for text in QUESTIONS),
        "prompts.csv": ("id,prompt\n" + "".join(f'1,"{text}"\n' for text in QUESTIONS)).encode(),
        "prompts.tsv": ("id\tprompt\n" + "".join(f"1\t{text}\n" for text in QUESTIONS)).encode(),
        "prompts.txt": "\n".join(QUESTIONS).encode(),
        "prompts.jsonl.gz": gzip.compress(jsonl({"prompt": text} for text in QUESTIONS)),
    }
    for name, content in data.items():
        (folder / name).write_bytes(content)
    table = pyarrow.Table.from_pylist(chats)
    pyarrow.parquet.write_table(table, folder / "messages.parquet")
    Dataset(table).save_to_disk(folder / "saved")
    return {name: folder / name for name in (*data, "messages.parquet", "saved")}


def test_the_same_conversations_give_the_same_answers_in_every_format(run, pair, tmp_path):
    sources = write_formats(tmp_path, load_tokenizer(pair.target_dir))
    answers = {}
    for name, path in sources.items():
        done, written = run("-i", path, name=f"run-{name.replace('.', '-')}")
        assert done.exit_code == 0, done.output
        answers[name] = [(line["usage"]["prompt_tokens"], line["token_ids"]) for line in written]
    assert len(answers["prompt.jsonl"]) == 10
    assert len({str(answer) for answer in answers["prompt.jsonl"]}) > 5
    assert all(answer == answers["prompt.jsonl"] for answer in answers.values()), answers


def test_a_completion_line_gets_raw_text_and_no_template(run, tmp_path):
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "abc", "max_tokens": 3}}
    (tmp_path / "in.jsonl").write_bytes(jsonl([line]))
    done, (written,) = run("-i", tmp_path / "in.jsonl")
    assert done.exit_code == 0, done.output
    assert (written["usage"], written["id"], written["url"]) == ({"prompt_tokens": 3, "completion_tokens": 3}, "c", "/v1/completions")


def test_the_second_turn_comes_after_the_models_own_first_answer(run, pair, tmp_path):
    turns = [["first", "second", "third"], ["alone"], ["one", "two"]]
    (tmp_path / "in.jsonl").write_bytes(jsonl({"question_id": number, "turns": item} for number, item in enumerate(turns)))
    done, written = run("-i", tmp_path / "in.jsonl", "--max-running-requests", "2")
    assert done.exit_code == 0, done.output
    assert [len(line.get("turns", [])) for line in written] == [3, 0, 2]
    for line, item in zip(written, turns, strict=True):
        history: list[dict] = []
        for number, text in enumerate(item):
            history += asked(text)
            (tmp_path / "one.jsonl").write_bytes(jsonl([{"messages": history}]))
            _, (alone,) = run("-i", tmp_path / "one.jsonl", name=f"alone-{line['index']}-{number}")
            got = line["turns"][number] if "turns" in line else line
            assert (got["text"], got["usage"]) == (alone["text"], alone["usage"])
            history.append({"role": "assistant", "content": alone["text"]})
        spec = line["spec"]
        num_tokens = len(item) + spec["spec_num_correct_drafts"] + spec["spec_verify_ct"] - spec["spec_num_cut_tokens"]
        assert line["usage"]["completion_tokens"] == len(line["token_ids"]) == num_tokens
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["accept"]["identity"] == {"holds": True, "num_violations": 0}


def test_a_later_turn_that_does_not_fit_makes_the_record_bad(run, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl([{"turns": ["a", "b" * 600]}, {"turns": ["a", "b"]}]))
    done, written = run("-i", tmp_path / "in.jsonl")
    assert done.exit_code == ExitCode.PARTIAL
    assert [line["index"] for line in written] == [1]
    (error,) = lines(tmp_path / "run" / "errors.jsonl")
    assert (error["code"], error["message"].startswith("turn 2: ")) == ("too_long", True)


@pytest.mark.parametrize(
    ("too_long", "code", "num_done"), [("error", 3, 1), ("skip", 0, 1), ("truncate-left", 0, 2), ("truncate-right", 0, 2)]
)
def test_what_becomes_of_a_prompt_that_is_too_long_is_chosen(run, tmp_path, too_long, code, num_done):
    (tmp_path / "in.jsonl").write_bytes(jsonl([{"prompt": "x" * 600}, {"prompt": "y"}]))
    done, written = run("-i", tmp_path / "in.jsonl", "--too-long", too_long)
    assert (done.exit_code, len(written)) == (code, num_done), done.output
    counts = json.loads((tmp_path / "run" / "stats.json").read_text())["counts"]
    assert counts["skipped_requests"] == (too_long == "skip")
    if too_long.startswith("truncate"):
        usage = written[0]["usage"]
        assert usage["prompt_tokens"] + 6 == 512
        assert usage["prompt_tokens"] + usage["cut_prompt_tokens"] == 600 + len("<user\n>\n<assistant\n")


def test_several_files_are_one_input_and_fields_are_kept(run, tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([{"prompt": name, "label": {"x": [name, None]}, "text": "mine"}]))
    done, written = run("-i", tmp_path / "*.jsonl", "--keep-fields")
    assert done.exit_code == 0, done.output
    assert [(Path(line["file"]).name, line["line"], line["index"]) for line in written] == [("a.jsonl", 1, 0), ("b.jsonl", 1, 1)]
    assert written[0]["input"] == {"prompt": "a", "label": {"x": ["a", None]}, "text": "mine"}
    assert "a.jsonl and 1 more: JSON lines, 2 records (2 prompt)" in done.stderr


def test_standard_input_is_generated_as_it_comes(pair, tmp_path):
    arguments = ["generate", "--target", str(pair.target_dir), "-i", "-", "-o", str(tmp_path / "run"), "--max-new-tokens", "3"]
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"], input=jsonl([{"prompt": "a"}, {"prompt": " "}, {"prompt": "b"}]))
    assert done.exit_code == ExitCode.PARTIAL, done.output
    assert [line["index"] for line in lines(tmp_path / "run" / "generations.jsonl")] == [0, 2]
    assert [line["code"] for line in lines(tmp_path / "run" / "errors.jsonl")] == ["empty_prompt"]
    assert json.loads((tmp_path / "run" / "stats.json").read_text())["counts"]["records"] == 3


def test_a_signal_ends_a_run_that_waits_for_standard_input(pair, tmp_path):
    arguments = ["--target", str(pair.target_dir), "-i", "-", "-o", str(tmp_path / "run"), "--max-new-tokens", "3", "--device", "cpu"]
    command = [sys.executable, "-m", "eaglecli", "generate", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdin.write('{"prompt": "a"}\n')
        process.stdin.flush()
        written = tmp_path / "run" / "generations.jsonl"
        wait_until(lambda: written.exists() and written.stat().st_size > 0)
        process.send_signal(signal.SIGINT)
        messages = process.stderr.read()  # to its end, while the pipe into the process stays open
        assert process.wait(timeout=60) == ExitCode.INTERRUPTED, messages
    assert len(lines(written)) == 1
    assert "Fatal" not in messages


def wait_until(is_true, limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_empty_standard_input_loads_no_model(tmp_path):
    arguments = ["generate", "--target", "no-such-model", "-i", "-", "-o", str(tmp_path / "run"), "--device", "cpu"]
    done = CliRunner().invoke(app, arguments, input=b"")
    assert done.exit_code == ExitCode.NOTHING_DONE, done.output


def test_fields_template_and_system_prompt_make_the_prompt(run, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl([{"q": {"text": "x{y}"}, "key": 7}]))
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}{{ tail }}")
    given = ["--prompt-template", "Say {q.text}", "--id-field", "key", "--system-prompt", "S", "--chat-template-kwargs", '{"tail": "!"}']
    done, (written,) = run("-i", tmp_path / "in.jsonl", *given, "--chat-template", tmp_path / "template.jinja")
    assert done.exit_code == 0, done.output
    assert (written["id"], written["usage"]["prompt_tokens"]) == (7, len("sS|uSay x{y}|!"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chat-template", "absent.jinja"], "cannot be read"),
        (["--chat-template-kwargs", "[1]"], "JSON object"),
        (["--chat-template-kwargs", '{"messages": 1}'], "must not set"),
        (["--system-prompt", "S", "--no-apply-chat-template"], "needs a chat template"),
        (["--map", "prompt"], "target=source"),
        (["--prompt-template", "{"], "stray"),
        (["--prompt-template", "{a}", "--prompt-field", "b"], "both say"),
        (["--shard", "0/2"], "i from 1 to n"),
        (["--encoding", "klingon"], "text encoding"),
        (["--delimiter", "ab"], "one character"),
        (["--input-format", "xml"], "xml"),
        (["--samples", "@absent"], "cannot be read"),
    ],
)
def test_a_wrong_input_option_is_one_sentence_before_weights_are_read(run, tmp_path, arguments, words):
    (tmp_path / "in.jsonl").write_bytes(jsonl([{"prompt": "a"}]))
    done, _ = run("-i", tmp_path / "in.jsonl", *arguments)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_inputs_of_a_config_file_count_from_its_folder(run, pair, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in.csv").write_bytes(b"question,n2\nx,y\n")
    config = tmp_path / "data" / "run.yaml"
    config.write_text(json.dumps({"target": str(pair.target_dir), "input": ["in.csv"], "map": ["prompt=question"]}))
    done, written = run("--config", config, models=["--draft", "none"])
    assert done.exit_code == 0, done.output
    assert Path(written[0]["file"]) == tmp_path / "data" / "in.csv"


def test_a_cut_character_is_left_as_the_tokenizer_spells_it_and_the_ids_are_whole(tmp_path):
    """B51, the side of the prompt: ids that end inside a character leak nothing of it into the text."""
    pair = write_cycle(tmp_path / "models")
    emoji = list("🙂".encode())
    (tmp_path / "in.jsonl").write_bytes(jsonl([{"prompt_token_ids": [97, *emoji[:2]]}]))
    arguments = ["generate", "--target", str(pair.target_dir), "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--max-new-tokens", "4"])
    assert done.exit_code == 0, done.output
    (line,) = lines(tmp_path / "run" / "generations.jsonl")
    cycle = next(cycle for cycle in disjoint_cycles() if emoji[1] in cycle)
    start = cycle.index(emoji[1]) + 1
    expected = [cycle[(start + step) % len(cycle)] for step in range(4)]
    assert line["token_ids"] == expected
    assert line["text"] == bytes(expected).decode("utf-8", errors="replace")
    assert line["usage"]["prompt_tokens"] == 3


EMPTY = ({"prompt": ""}, {"prompt": " "}, {"prompt": None}, {"other": 1}, {"prompt_token_ids": []}, {"messages": []})


@pytest.mark.parametrize("where", ["first", "middle", "last", "all"])
def test_records_without_a_prompt_are_errors_and_change_no_other(run, tmp_path, where):
    """B58. The tokenizer adds nothing of its own."""
    full = [{"prompt": text} for text in ("a", "b", "c")]
    at = {"first": 0, "middle": 1, "last": 3, "all": 0}[where]
    records = list(EMPTY) if where == "all" else [*full[:at], *EMPTY, *full[at:]]
    (tmp_path / "in.jsonl").write_bytes(jsonl(records))
    (tmp_path / "clean.jsonl").write_bytes(jsonl(full))
    done, written = run("-i", tmp_path / "in.jsonl", "--no-apply-chat-template")
    assert done.exit_code == (ExitCode.NOTHING_DONE if where == "all" else ExitCode.PARTIAL)
    assert len(lines(tmp_path / "run" / "errors.jsonl")) == len(EMPTY)
    _, clean = run("-i", tmp_path / "clean.jsonl", "--no-apply-chat-template", name="clean")
    assert [line["token_ids"] for line in written] == ([] if where == "all" else [line["token_ids"] for line in clean])


def test_results_are_told_apart_by_index_whatever_ids_and_prompts_say(run, tmp_path):
    """B60, B61."""
    ids = ["a", "a", 1, "1", None, None]
    records = [{"id": name, "prompt": "x" * 200 if number == 0 else "same"} for number, name in enumerate(ids)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(records))
    done, written = run("-i", tmp_path / "in.jsonl", "--max-running-requests", "4")
    _, again = run("-i", tmp_path / "in.jsonl", "--max-running-requests", "2", name="again")
    assert [(line["index"], line["id"], line["line"]) for line in written] == [
        *((0, "a", 1), (1, "a", 2), (2, 1, 3), (3, "1", 4), (4, "record-4", 5), (5, "record-5", 6)),
    ]
    assert written[0]["token_ids"] != written[1]["token_ids"]
    assert len({str(line["token_ids"]) for line in written[1:]}) == 1
    assert [line["token_ids"] for line in again] == [line["token_ids"] for line in written]
    assert "lines 1, 2" in done.stderr
    refused, _ = run("-i", tmp_path / "in.jsonl", "--on-error", "stop", name="strict")
    assert (refused.exit_code, "lines 1, 2" in refused.stderr) == (ExitCode.USAGE, True)


def test_one_bad_line_of_five_is_an_error_and_strict_mode_names_it(run, tmp_path):
    """B49."""
    bad = ['{"prompt": ', "[1,2]", '"text"', "null", '{"prompt": 7}']
    for number, line in enumerate(bad):
        (tmp_path / "in.jsonl").write_bytes(jsonl([{"prompt": "a"}] * 2) + line.encode() + b"\n" + jsonl([{"prompt": "b"}] * 2))
        done, written = run("-i", tmp_path / "in.jsonl", name=f"run-{number}")
        assert (done.exit_code, len(written)) == (ExitCode.PARTIAL, 4)
        assert [line["line"] for line in lines(tmp_path / f"run-{number}" / "errors.jsonl")] == [3]
        strict, none = run("-i", tmp_path / "in.jsonl", "--on-error", "stop", name=f"strict-{number}")
        assert (strict.exit_code, none, "line 3" in strict.stderr) == (ExitCode.USAGE, [], True)


def test_messages_without_any_template_are_errors_that_say_so(run, pair, tmp_path):
    """B55."""
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(pair.target_dir, bare)
    for path in (bare / "tokenizer_config.json", bare / "chat_template.jinja"):
        if path.exists() and path.suffix == ".json":
            path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "chat_template"}))
        else:
            path.unlink(missing_ok=True)
    (tmp_path / "in.jsonl").write_bytes(jsonl([{"messages": asked("a")}, {"prompt": "a"}]))
    done, written = run("-i", tmp_path / "in.jsonl", models=["--target", str(bare)])
    assert done.exit_code == ExitCode.PARTIAL, done.output
    (error,) = lines(tmp_path / "run" / "errors.jsonl")
    assert (error["code"], "need a chat template" in error["message"]) == ("template", True)
    assert written[0]["usage"]["prompt_tokens"] == 1
