"""When a run is taken up again, when it is refused, and what is left of damaged files. The models are the CYCLE pair."""

import json
import time

import pytest

from eaglecli.commands._open_engine import FoundModels
from eaglecli.errors import ExitCode
from eaglecli.io.run_directory import RunDirectory
from tests.commands.program import Program, write_records
from tests.fixtures import write_cycle, write_rand

RECORDS = [{"id": number, "prompt": f"{number}", "temperature": 0.5 * (number % 2)} for number in range(8)]
BAD = {"id": "bad", "prompt": ""}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture
def program(pair, tmp_path):
    return Program(pair, write_records(tmp_path / "input.jsonl", [*RECORDS, BAD]), tmp_path / "run")


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights is an error from here on."""

    def forbid():
        def open_engine(self, settings, needs):
            raise AssertionError("weights were read")

        monkeypatch.setattr(FoundModels, "open_engine", open_engine)

    return forbid


def cut_short(program: Program, keep: bytes) -> None:
    """Makes the directory that of a run that was killed when its file held `keep`."""
    (program.output / "generations.jsonl").write_bytes(keep)
    manifest = program.document("manifest.json")
    (program.output / "manifest.json").write_text(json.dumps({**manifest, "status": "running", "exit_code": None}))
    (program.output / "stats.json").unlink()


def file_lines(program: Program, name: str = "generations.jsonl") -> list[bytes]:
    return (program.output / name).read_bytes().splitlines(keepends=True)


def without_times(line: dict) -> dict:
    return {name: value for name, value in line.items() if name != "timing"}


def test_a_complete_run_ends_at_once_with_its_first_code_and_reads_no_weights(program, no_weights):
    """B69."""
    assert program.run().exit_code == ExitCode.PARTIAL
    before = {path.name: path.read_bytes() for path in program.output.iterdir() if path.name != "log.txt"}
    no_weights()
    for _ in range(2):
        done = program.run("--json")
        assert done.exit_code == ExitCode.PARTIAL, done.output
        assert json.loads(done.stdout)["counts"]["successful_requests"] == 8
        assert "complete" in done.stderr
    assert {name: (program.output / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("num_kept", [0, 2, 4, 7])
def test_after_a_cut_only_the_rest_is_done_and_the_results_are_the_same(program, num_kept):
    """B69, B34: greedy and seeded records."""
    program.run()
    whole, stats = program.lines(), program.document("stats.json")
    kept = file_lines(program)[::-1][:num_kept]
    cut_short(program, b"".join(kept))
    done = program.run()
    assert done.exit_code == ExitCode.PARTIAL, done.output
    assert list(map(without_times, program.lines())) == list(map(without_times, whole))
    assert set(kept) <= set(file_lines(program)), "a finished record was done again"
    again = program.document("stats.json")
    assert (again["counts"], again["accept"]) == (stats["counts"], stats["accept"])
    assert [session["status"] for session in program.document("manifest.json")["sessions"]][-1] == "complete"


def test_a_torn_last_line_is_cut_off_and_its_record_done_again(program):
    """B68, B69."""
    program.run()
    whole, kept = program.lines(), file_lines(program)
    cut_short(program, b"".join(kept[:4]) + kept[4][:30])
    assert program.run().exit_code == ExitCode.PARTIAL
    assert list(map(without_times, program.lines())) == list(map(without_times, whole))


@pytest.mark.parametrize("ordered", ["--ordered", "--unordered"])
def test_lines_that_are_damaged_or_come_twice_are_left_out(program, ordered):
    program.run()
    whole, kept = program.lines(), file_lines(program)
    cut_short(program, b"".join([kept[3], b"\0" * 40 + b"\n", kept[0], kept[3], b'{"index": "x"}\n']))
    done = program.run(ordered)
    assert done.exit_code == ExitCode.PARTIAL
    assert "3 lines" in done.stderr
    in_order = sorted(program.lines(), key=lambda line: line["index"])
    assert list(map(without_times, in_order)) == list(map(without_times, whole))
    assert (program.lines() == in_order) is (ordered == "--ordered")


def test_killed_when_all_was_done_it_is_finished_without_a_model(program, no_weights):
    """B69: nothing is left but the order and the reports."""
    program.run()
    kept = file_lines(program)
    cut_short(program, b"".join(kept[::-1]))
    no_weights()
    assert program.run().exit_code == ExitCode.PARTIAL
    assert file_lines(program) == kept
    assert program.document("stats.json")["counts"]["successful_requests"] == 8


def test_results_that_have_gone_are_made_again_whatever_the_manifest_says(program):
    program.run()
    whole = program.lines()
    (program.output / "generations.jsonl").unlink()
    assert program.run().exit_code == ExitCode.PARTIAL
    assert list(map(without_times, program.lines())) == list(map(without_times, whole))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "1"], "temperature: 0.0 -> 1.0"),
        (["--seed", "5"], "random_seed: 0 -> 5"),
        (["--max-new-tokens", "5"], "max_new_tokens: 4 -> 5"),
        (["--no-apply-chat-template"], "apply_chat_template: True -> False"),
        (["--dtype", "bfloat16"], "dtype: float32 -> bfloat16"),
        (["--draft", "none"], "speculation: 5/1/6 -> none"),
        (["--num-speculative-tokens", "3"], "speculation: 5/1/6 -> 3/1/4"),
        (["--limit", "3"], "limit: none -> 3"),
        (["--offset", "1"], "offset: 0 -> 1"),
    ],
)
def test_a_setting_that_changes_text_is_refused_with_the_difference(program, no_weights, arguments, words):
    program.run()
    before = file_lines(program)
    no_weights()
    refused = program.run(*arguments)
    assert refused.exit_code == ExitCode.USAGE
    assert words in " ".join(refused.stderr.split())
    assert "--overwrite" in refused.stderr
    assert file_lines(program) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-running-requests", "2"],
        ["--page-size", "4"],
        ["--chunked-prefill-size", "7"],
        ["--progress", "plain"],
        ["--dtype", "float32"],
        ["--temperature", "0"],
    ],
)
def test_what_cannot_change_text_may_differ(program, arguments):
    program.run()
    whole = program.lines()
    cut_short(program, b"".join(file_lines(program)[:3]))
    assert program.run(*arguments).exit_code == ExitCode.PARTIAL
    assert [line["token_ids"] for line in program.lines()] == [line["token_ids"] for line in whole]


def test_another_model_under_the_same_name_is_refused(tmp_path):
    program = Program(write_cycle(tmp_path / "models"), write_records(tmp_path / "input.jsonl", RECORDS), tmp_path / "run")
    assert program.run().exit_code == 0
    write_rand(tmp_path / "models")
    refused = program.run()
    assert (refused.exit_code, "target: another model" in refused.stderr) == (ExitCode.USAGE, True)


def test_an_input_that_grew_at_its_end_is_continued(program):
    program.run()
    before = file_lines(program)
    with program.source.open("a") as source:
        source.write(json.dumps({"id": "new", "prompt": "new"}) + "\n")
    done = program.run()
    assert done.exit_code == ExitCode.PARTIAL, done.output
    assert file_lines(program)[: len(before)] == before
    assert [line["index"] for line in program.lines()] == [*range(8), 9]


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace('"prompt": "3"', '"prompt": "three"'),
        lambda text: text.split("\n", 1)[1],
        lambda text: json.dumps({"prompt": "first"}) + "\n" + text,
        lambda text: text[:-1] + " \n",
    ],
    ids=["a record edited", "a record removed", "a record put before", "the last line edited"],
)
def test_any_other_edit_of_the_input_is_refused(program, edit):
    program.run()
    before = file_lines(program)
    program.source.write_text(edit(program.source.read_text()))
    refused = program.run()
    assert (refused.exit_code, "input: its content was changed" in refused.stderr) == (ExitCode.USAGE, True)
    assert file_lines(program) == before


def test_a_last_line_that_was_made_longer_is_no_growth(program):
    text = program.source.read_text().rstrip("\n")
    program.source.write_text(text)
    program.run()
    program.source.write_text(text + " \n")
    assert program.run().exit_code == ExitCode.USAGE
    program.source.write_text(text + "\n" + json.dumps({"prompt": "new"}) + "\n")
    assert program.run().exit_code == ExitCode.PARTIAL


def test_a_limit_may_be_raised(program):
    assert program.run("--limit", "3").exit_code == 0
    before = file_lines(program)
    assert program.run("--limit", "6").exit_code == 0
    assert file_lines(program)[:3] == before
    assert len(program.lines()) == 6


def test_overwrite_starts_anew_and_no_resume_refuses(program):
    program.run()
    refused = program.run("--no-resume")
    assert (refused.exit_code, "--overwrite" in refused.stderr) == (ExitCode.USAGE, True)
    assert program.run("--overwrite", "--max-new-tokens", "2").exit_code == ExitCode.PARTIAL
    assert all(len(line["token_ids"]) == 2 for line in program.lines())
    assert len(program.document("manifest.json")["sessions"]) == 1


def test_retry_failed_does_error_records_alone_again(program):
    """A cache that was too small has made the long record fail; with a larger one it is done."""
    write_records(program.source, [*RECORDS, {"id": "long", "prompt": "x" * 100}])
    assert program.run("--max-total-tokens", "96").exit_code == ExitCode.PARTIAL
    assert [line["code"] for line in program.lines("errors.jsonl")] == ["too_long"]
    before = file_lines(program)
    assert program.run("--max-total-tokens", "512").exit_code == ExitCode.PARTIAL
    assert file_lines(program) == before
    done = program.run("--max-total-tokens", "512", "--retry-failed")
    assert done.exit_code == 0, done.output
    assert file_lines(program)[:8] == before
    assert program.lines()[8]["id"] == "long"
    assert program.lines("errors.jsonl") == []
    assert program.document("stats.json")["counts"]["failed_requests"] == 0


def test_records_with_one_id_are_told_apart_by_their_index(program):
    """B61."""
    write_records(program.source, [{"id": "a", "prompt": "same", "temperature": 9.0} for _ in range(4)])
    program.run()
    whole = program.lines()
    cut_short(program, b"".join(file_lines(program)[1:3]))
    assert program.run().exit_code == 0
    assert list(map(without_times, program.lines())) == list(map(without_times, whole))


def test_a_run_that_made_nothing_is_no_reason_to_refuse_another(program, monkeypatch):
    def fail(self, settings, needs):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(FoundModels, "open_engine", fail)
        assert program.run("--max-new-tokens", "3").exit_code == ExitCode.MEMORY
    assert program.document("manifest.json")["status"] == "failed"
    assert program.run().exit_code == ExitCode.PARTIAL


def test_one_process_writes_a_directory_at_a_time(program):
    program.run()
    before = file_lines(program)
    with RunDirectory(program.output):
        refused = program.run("--overwrite")
        assert (refused.exit_code, "another run" in refused.stderr) == (ExitCode.USAGE, True)
    assert file_lines(program) == before


def test_a_directory_that_holds_something_else_is_not_touched(program):
    program.output.mkdir()
    (program.output / "thesis.tex").write_text("mine")
    refused = program.run()
    assert (refused.exit_code, "holds no run" in refused.stderr) == (ExitCode.USAGE, True)
    assert program.run("--overwrite").exit_code == ExitCode.PARTIAL
    assert (program.output / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"identity": {"input": [], "settings": {}}, "status": "complete"}'])
def test_a_manifest_that_cannot_be_read_is_one_sentence(program, text):
    program.run()
    (program.output / "manifest.json").write_text(text)
    refused = program.run()
    assert (refused.exit_code, "manifest" in refused.stderr, "Traceback" in refused.stderr) == (ExitCode.USAGE, True, False)
    assert program.run("--overwrite").exit_code == ExitCode.PARTIAL


def test_the_row_with_a_seed_keeps_its_tokens_wherever_it_stands(pair, tmp_path):
    """B34: alone, among others, first and last, after a cut; equal seeds give equal rows, others differ."""
    seeded = {"id": "s", "prompt": "same", "temperature": 9.0, "seed": 7}
    others = [{"id": n, "prompt": f"other {n}", "temperature": 9.0} for n in range(6)]
    inputs = {
        "alone": [seeded],
        "first": [seeded, *others],
        "last": [*others, seeded],
        "twice": [seeded, *others, {**seeded, "id": "t"}, {**seeded, "id": "u", "seed": 8}],
    }
    found = {}
    for name, records in inputs.items():
        program = Program(pair, write_records(tmp_path / f"{name}.jsonl", records), tmp_path / name)
        assert program.run().exit_code == 0
        found[name] = {line["id"]: line["token_ids"] for line in program.lines()}
    cut_short(program, b"".join(file_lines(program)[1:4]))
    assert program.run().exit_code == 0
    found["resumed"] = {line["id"]: line["token_ids"] for line in program.lines()}
    assert len({tuple(ids["s"]) for ids in found.values()}) == 1
    assert found["twice"]["t"] == found["twice"]["s"] != found["twice"]["u"]
    assert found["resumed"] == found["twice"]


def test_a_pipe_is_not_taken_up_again(program):
    from typer.testing import CliRunner

    from eaglecli.cli import app

    text = program.source.read_text()
    arguments = [part if part != str(program.source) else "-" for part in program.arguments()]
    assert CliRunner().invoke(app, arguments, input=text).exit_code == ExitCode.PARTIAL
    refused = CliRunner().invoke(app, arguments, input=text)
    assert (refused.exit_code, "--overwrite" in refused.stderr) == (ExitCode.USAGE, True)


def test_the_lock_of_a_killed_process_is_gone(program):
    """flock: the system gives it back, so nobody has to delete a file."""
    import multiprocessing

    def hold(path) -> None:
        directory = RunDirectory(path)
        time.sleep(60)
        directory.log.close()

    holder = multiprocessing.get_context("fork").Process(target=hold, args=(program.output,))
    holder.start()
    while not (program.output / "log.txt").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    assert program.run().exit_code == ExitCode.USAGE
    holder.kill()
    holder.join()
    assert program.run().exit_code == ExitCode.PARTIAL
