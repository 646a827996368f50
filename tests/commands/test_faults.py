"""A thousand records, one in twenty bad, in every way that a record can be bad."""

import json

import pytest

from eaglecli.errors import ExitCode
from tests.commands.program import Program
from tests.fixtures import write_cycle

FAULTS = {
    b'{"id": %d, "prompt": "cut off': "invalid_json",
    b'{"id": %d, "prompt": "a",}': "invalid_json",
    b'[%d, "prompt"]': "not_object",
    b'{"id": %d, "prompt": "caf\xe9"}': "encoding",
    b'{"id": %d, "prompt": "\\ud800"}': "encoding",
    b'{"id": %d, "question": "a"}': "missing_prompt",
    b'{"id": %d, "prompt": " "}': "empty_prompt",
    b'{"id": %d, "messages": []}': "empty_prompt",
    b'{"id": %d, "prompt": 7}': "bad_type",
    b'{"id": %d, "prompt": "a", "messages": [{"role": "user", "content": "b"}]}': "ambiguous",
    b'{"id": %d, "messages": [{"role": "tool", "content": "b"}]}': "template",
    b'{"id": %d, "prompt": "' + b"x" * 600 + b'"}': "too_long",
    b'{"id": %d, "prompt": "a", "max_new_tokens": 500}': "too_long",
    b'{"id": %d, "prompt": "a", "temperature": "hot"}': "bad_option",
    b'{"id": %d, "prompt": "a", "use_beam_search": true}': "unsupported",
    b'{"custom_id": "c%d", "method": "GET", "url": "/v1/completions", "body": {"prompt": "a"}}': "unsupported",
}
NUM_RECORDS = 1000


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    source = folder / "input.jsonl"
    templates = list(FAULTS)
    expected, rows = {}, []
    for number in range(NUM_RECORDS):
        if number % 20 == 7:
            template = templates[number // 20 % len(templates)]
            expected[number] = FAULTS[template]
            rows.append(template % number)
        else:
            rows.append(b'{"id": %d, "prompt": "%d"}' % (number, number))
    source.write_bytes(b"\n".join(rows) + b"\n")
    program = Program(write_cycle(folder / "cycle"), source, folder / "run")
    return program, program.run("--max-new-tokens", "2", "--max-running-requests", "128", "--chunked-prefill-size", "2048"), expected


def test_all_good_records_finish_and_the_code_is_3(done):
    program, result, expected = done
    assert result.exit_code == ExitCode.PARTIAL, result.output
    assert [line["index"] for line in program.lines()] == [number for number in range(NUM_RECORDS) if number not in expected]
    assert all(len(line["token_ids"]) == 2 and line["text"] for line in program.lines())


def test_each_bad_record_is_set_aside_with_its_line_and_code(done):
    program, _, expected = done
    errors = {line["index"]: line for line in program.lines("errors.jsonl")}
    assert {index: line["code"] for index, line in errors.items()} == expected
    assert all(line["line"] == index + 1 and line["message"] and line["raw"] for index, line in errors.items())
    assert set(expected.values()) == set(FAULTS.values()), "a kind of fault did not come up"


def test_the_statistics_count_them(done):
    program, result, expected = done
    counts = json.loads((program.output / "stats.json").read_text())["counts"]
    assert (counts["records"], counts["successful_requests"], counts["failed_requests"]) == (NUM_RECORDS, 950, 50)
    assert sum(counts["error_codes"].values()) == 50
    assert "50 failed" in result.stderr
