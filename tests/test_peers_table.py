"""The recorded figures of other tools and how they are looked up."""

from benchmarks.peers_table import BATCHES, HEADER, MODES, PEERS, Row, best_peer


def test_the_better_of_two_tools_is_taken():
    assert best_peer("llama-3.1-8b", "plain", 1) == ("SGLang", 207.6)
    assert best_peer("llama-3.1-8b", "plain", 256) == ("vLLM", 20772)
    assert best_peer("llama-3.1-8b", "tree", 64) == ("SGLang", 4838)


def test_what_was_not_measured_has_no_peer():
    assert best_peer("tiny", "plain", 1) == (None, None)
    assert best_peer("smollm2-135m", "K7", 1) == (None, None)
    assert best_peer("llama-3.1-8b", "plain", 3) == (None, None)


def test_every_figure_belongs_to_a_mode_and_a_batch_size():
    assert {mode for _, mode in PEERS} <= set(MODES)
    assert all(len(rates) == len(BATCHES) for figures in PEERS.values() for rates in figures.values())


def test_lines_stand_under_their_header():
    rows = [Row("s", "K5", 1, 500.0, 2.88, 5.6, 4.7, "SGLang", 430.0, 3.0), Row("s", "plain", 256, 1e5, None, None, 4.7, None, None, 3.0)]
    assert {len(row.line()) for row in rows} == {len(HEADER)}
    assert "1.16" in rows[0].line()
