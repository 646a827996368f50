"""Files of a bench beside its results: what was generated, and the picture."""

import json
from pathlib import Path
from typing import Any

from eaglecli.commands._bench_measure import Measurement
from eaglecli.commands._bench_prompts import BenchData
from eaglecli.io.bench_results import REPORT
from eaglecli.io.console import Console
from eaglecli.io.run_directory import GENERATIONS
from eaglecli.io.stop_strings import answer_text


def write_generations(folder: Path, measurement: Measurement, data: BenchData, is_first: bool) -> None:
    """Append the answers of the middle pass, one line each in the order of the data; the file begins with the first configuration."""
    assert data.tokenizer is not None, "only text that means something is written"
    with (folder / GENERATIONS).open("w" if is_first else "a", encoding="utf-8") as file:
        for done in sorted(measurement.middle.completions, key=lambda completion: completion.request.key):  # type: ignore[arg-type, return-value]
            text = answer_text(data.tokenizer.decode, done.output_ids, done.stop_reason)
            line = {
                "configuration": measurement.configuration.label,
                "index": done.request.key,
                "dataset": data.tags[done.request.key],  # type: ignore[index]
                "text": text,
                "token_ids": done.output_ids.tolist(),
                "finish_reason": done.finish_reason,
                "usage": {"prompt_tokens": len(done.request.prompt_ids), "completion_tokens": len(done.output_ids)},
                "spec_verify_ct": done.num_verify_steps,
                "spec_num_correct_drafts": done.num_accepted_drafts,
                "spec_num_proposed_drafts": done.num_proposed_drafts,
                "spec_num_cut_tokens": done.num_cut_tokens,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def write_plot(folder: Path, document: dict[str, Any], console: Console) -> None:
    """report.png, where matplotlib is there."""
    try:
        from eaglecli.io.bench_plot import draw_report
    except ImportError:
        console.note("no picture was drawn: pip install 'eaglecli[plot]' draws one")
        return
    draw_report(document, folder / REPORT)
