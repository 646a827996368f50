"""Rows STOP of the known failures: an answer ends at the same token as in plain decoding, wherever steps and tokens end.

Tokens of the letters target are the bytes of its text, so the text of any output is known beforehand.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglecli.engine.attention_backend import TORCH
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.engine.settings import PLAIN, EngineSettings, SchedulingSettings, SpeculationSettings
from eaglecli.io.stop_strings import watch_maker
from tests.engine.harness import CONTEXT, LoadedPair, Triple, load_pair, make_engine, mixed_requests, random_prompt, run, texts
from tests.fixtures import text_cycle, write_cycle

LETTERS = b"abcdefghijklmnopqrstuvwxyz"
CAP = 40
TRIPLES = [None, (1, 1, 2), (5, 1, 6), (3, 2, 6)]
Engines = dict[object, Engine]


class ByteTokens:
    """Ids below 256 are bytes."""

    def read(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


def engine_ahead(pair: LoadedPair, triple: Triple | None, **settings: object) -> Engine:
    """With an iteration in flight when a record is read, as on a GPU: rows that the host ends are on the device still."""
    options = {"context_length": CONTEXT, "max_total_tokens": 32768, **settings}
    speculation = SpeculationSettings(*triple) if triple else PLAIN
    draft = pair.draft.model if triple else None
    return Engine(pair.target.model, draft, EngineSettings(speculation=speculation, **options), replace(TORCH, needs_host_lengths=False))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    return load_pair(write_cycle(tmp_path_factory.mktemp("letters"), [text_cycle(LETTERS.decode())]))


@pytest.fixture(scope="module")
def engines(letters: LoadedPair) -> Engines:
    """One for each triple, used again and again: rows and pages are always those of requests that ended somehow."""
    return {triple: engine_ahead(letters, triple, max_running_requests=4, page_size=4) for triple in TRIPLES}


def after(byte: int, count: int) -> bytes:
    """What the letters target says after a letter."""
    place = LETTERS.index(byte) + 1
    return bytes(LETTERS[(place + offset) % 26] for offset in range(count))


def asked(key: object, prompt: bytes, strings: Sequence[str] = (), cap: int = CAP, stop_token_ids: Sequence[int] = ()) -> Request:
    ids = np.frombuffer(prompt, np.uint8).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=cap, stop_token_ids=tuple(stop_token_ids))
    return Request(key, ids, sampling, make_stop_watch=watch_maker(strings, ByteTokens) if strings else None)


def ending(completion: Completion) -> tuple[bytes, str, object]:
    return bytes(completion.output_ids.tolist()), completion.finish_reason, completion.stop_reason


def naive(request: Request, strings: Sequence[str]) -> tuple[bytes, str, object]:
    """Token after token: a stop id, then a string in the text, then the cap."""
    output = b""
    for byte in after(int(request.prompt_ids[-1]), request.sampling.max_new_tokens):
        output += bytes([byte])
        if byte in request.sampling.stop_token_ids:
            return output, "stop", byte
        found = [(output.find(string.encode()), len(string), string) for string in strings if string.encode() in output]
        if found:
            return output, "stop", min(found)[2]
    return output, "length", None


# ---- B37: stop ids in the middle of a run ----------------------------------------------------------------------------


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_a_stop_id_ends_the_output_at_every_place_of_a_step(engines: Engines, triple: object) -> None:
    """B37: the end token is the last one and counted, accepted drafts behind it are cut."""
    requests = [asked(place, b"z", stop_token_ids=[LETTERS[place]]) for place in range(12)]
    for place, completion in run(engines[triple], requests).items():
        assert ending(completion) == (LETTERS[: place + 1], "stop", LETTERS[place])


# ---- B39: stop strings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_a_stop_string_is_found_at_every_alignment_to_steps(engines: Engines, triple: object) -> None:
    """B39: also where it spans two steps; one that begins in the prompt (`c`) does not count, the next one does."""
    requests = [asked(byte, bytes([byte]), ["cd"]) for byte in LETTERS]
    completions = run(engines[triple], requests)
    for request in requests:
        assert ending(completions[request.key]) == naive(request, ["cd"])
    assert {len(completion.output_ids) for completion in completions.values()} == set(range(2, 28))


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_a_stop_string_of_one_character_can_end_the_first_token(engines: Engines, triple: object) -> None:
    """B39, B41: the token that prefill makes is looked at too."""
    completions = run(engines[triple], [asked(0, b"b", ["c"]), asked(1, b"a", ["c"]), asked(2, b"x", ["yzabcdefghi"], cap=11)])
    assert [ending(completions[key]) for key in range(3)] == [
        (b"c", "stop", "c"),
        (b"bc", "stop", "c"),
        (b"yzabcdefghi", "stop", "yzabcdefghi"),
    ]


@pytest.mark.parametrize("triple", [(2, 1, 3), (5, 1, 6)], ids=str)
def test_stop_strings_of_many_bytes_end_where_the_last_byte_is(tmp_path, triple: tuple[int, int, int]) -> None:
    """B39: a token a byte; U+0082 is no part of the euro sign although its last byte is in there."""
    text = "é€😀ก"
    pair = load_pair(write_cycle(tmp_path, [text_cycle(text)]))
    data, sign = text.encode(), "€".encode()
    requests = [asked(start, data[start - 1 : start], ["\u0082", "€"], cap=30) for start in range(1, len(data))]
    for start, completion in run(engine_ahead(pair, triple), requests).items():
        said = data[start:] + data + data
        assert ending(completion) == (said[: said.index(sign) + len(sign)], "stop", "€")


def test_what_was_cut_is_counted_and_the_row_runs_once_more(letters: LoadedPair) -> None:
    """B39, B63: a step of six tokens, of which two are kept; the steps behind it are not the answer's."""
    engine = engine_ahead(letters, (5, 1, 6))
    (completion,) = run(engine, [asked(0, b"z", ["c"])]).values()
    assert (len(completion.output_ids), completion.num_verify_steps, completion.num_accepted_drafts) == (3, 1, 5)
    assert completion.num_cut_tokens == 4
    assert engine.counts.num_iterations == 2
    assert engine.counts.num_output_tokens == 3


def test_a_stop_id_hides_its_own_text_and_the_first_end_counts(engines: Engines) -> None:
    """The token that ends as an id has no text, so it completes no string; what ends before it does."""
    cases = {
        "id": (asked("id", b"a", ["c"], stop_token_ids=[ord("c")]), (b"bc", "stop", ord("c"))),
        "string": (asked("string", b"a", ["bc"], stop_token_ids=[ord("d")]), (b"bc", "stop", "bc")),
        "cap": (asked("cap", b"a", ["bc"], cap=2), (b"bc", "stop", "bc")),
        "length": (asked("length", b"a", ["bcd"], cap=2), (b"bc", "length", None)),
    }
    for triple in TRIPLES:
        completions = run(engines[triple], [request for request, _ in cases.values()])
        assert {key: ending(completion) for key, completion in completions.items()} == {key: end for key, (_, end) in cases.items()}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_stops_and_any_step_borders_end_where_a_naive_reader_ends_them(engines: Engines, data: st.DataObject) -> None:
    """Issue 5: random strings, ids, caps and prompts, several requests at a time, in an engine that has served others before."""
    string = st.integers(0, 25).flatmap(lambda first: st.integers(1, 9).map(lambda size: after(LETTERS[first], size).decode()))
    requests, strings = [], {}
    for key in range(data.draw(st.integers(1, 6))):
        strings[key] = data.draw(st.lists(st.one_of(string, st.text("abz", min_size=1, max_size=2)), max_size=3, unique=True))
        prompt = bytes(data.draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5)))
        ids = data.draw(st.lists(st.sampled_from(LETTERS), max_size=2))
        requests.append(asked(key, prompt, strings[key], cap=data.draw(st.integers(1, CAP)), stop_token_ids=ids))
    completions = run(engines[data.draw(st.sampled_from(TRIPLES))], requests)
    for request in requests:
        assert ending(completions[request.key]) == naive(request, strings[request.key])


@pytest.mark.parametrize("triple", [(4, 1, 5), (3, 3, 8)], ids=str)
def test_stop_strings_among_sampled_rows_leave_the_others_alone(twin: LoadedPair, triple: tuple[int, int, int]) -> None:
    """Rows that the host ends are used again at once: texts stay those of plain decoding, with two rows for 24 requests."""
    strings = [chr(byte) for byte in range(97, 123)]
    requests = [
        Request(r.key, r.prompt_ids, r.sampling, r.sample, watch_maker(strings, ByteTokens) if r.key % 2 else None)
        for r in mixed_requests(24, seed=4, max_prompt=40)
    ]
    engine = engine_ahead(twin, triple, max_running_requests=2, chunked_prefill_size=16)
    found = run(engine, requests)
    assert engine.counts.num_wasted_row_steps > 0
    plain = run(make_engine(twin.target, None), requests)
    assert texts(found) == texts(plain)
    ended = [completion for completion in plain.values() if completion.stop_string is not None]
    assert len(ended) >= 4
    assert all(bytes(c.output_ids[-1:].tolist()).decode() == c.stop_string for c in ended)


@pytest.mark.parametrize("triple", [None, (3, 1, 4)], ids=str)
def test_stop_strings_end_a_preempted_output_where_they_would_have(rand: LoadedPair, triple: Triple | None) -> None:
    """A request that lost its row and goes on in another one is read from its first token: the string may span the gap."""
    requests = [replace(r, sampling=replace(r.sampling, max_new_tokens=36)) for r in mixed_requests(4, seed=3)]
    free = run(make_engine(rand.target, None), requests)
    spans = {key: [token for token in completion.output_ids[8:36].tolist() if token < 128] for key, completion in free.items()}
    watched = [replace(r, make_stop_watch=watch_maker([bytes(spans[r.key][:12]).decode()], ByteTokens)) for r in requests]
    expected = run(make_engine(rand.target, None), watched)
    tight = engine_ahead(rand, triple, page_size=4, max_total_tokens=108, scheduling=SchedulingSettings(pledged_share=0.0, growth_tokens=4))
    assert texts(run(tight, watched)) == texts(expected)
    assert tight.summary()["num_preemptions"] >= 1


# ---- B41: caps and sets of ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_caps_of_few_tokens_give_exactly_as_many(engines: Engines, triple: object) -> None:
    """B41: the first token comes from prefill."""
    completions = run(engines[triple], [asked(cap, b"z", cap=cap) for cap in (1, 2, 3)])
    assert [ending(completions[cap]) for cap in (1, 2, 3)] == [(LETTERS[:cap], "length", None) for cap in (1, 2, 3)]


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_any_of_several_end_tokens_ends_the_output_even_the_very_first_token(engines: Engines, triple: object) -> None:
    """B41: a list of ids is never cut to one; without ids (ignore-eos) the output runs to the cap."""
    ids = [ord("a"), ord("g"), ord("q")]
    requests = [asked(prompt, prompt, stop_token_ids=ids) for prompt in (b"z", b"b", b"h", b"r")]
    completions = run(engines[triple], [*requests, asked("none", b"z")])
    assert [completions[r.key].stop_token_id for r in requests] == [ord("a"), ord("g"), ord("q"), ord("a")]
    assert len(completions[b"z"].output_ids) == 1
    assert ending(completions["none"]) == (after(ord("z"), CAP), "length", None)


def test_a_row_without_stop_strings_is_shown_to_nobody(letters: LoadedPair) -> None:
    """The look costs nothing where nobody asked for it."""

    class Counted:
        num_looks = 0

        def look(self, output_ids: np.ndarray) -> None:
            Counted.num_looks += 1

    watched = Request("watched", random_prompt(3), SamplingParams(max_new_tokens=6), make_stop_watch=Counted)
    engine = make_engine(letters.target, letters.draft, (5, 1, 6), max_running_requests=1)
    run(engine, [watched, *(asked(key, b"a", cap=30) for key in range(3))])
    assert 1 <= Counted.num_looks <= 6
