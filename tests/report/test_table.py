"""The comparison table: its means, its width, its text without a terminal."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import sys
from collections.abc import Callable

import pytest

from gated_attn.records import CompareRecord, Paired, RunRecord
from gated_attn.report.table import DASH, WIDTH, _fold, columns, print_table, render_text, summarize, verdict_lines

MakeRun = Callable[..., RunRecord]
MakeCompare = Callable[..., CompareRecord]
MakeStudy = Callable[..., tuple[CompareRecord, list[RunRecord]]]

LONG = "output:elementwise:nssigmoid,source=query_key,in=12,rank=16,bias=-2,std=0.02,top_k=4,fill,layers=0-3,7"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_rows_are_means_over_seeds(make_study: MakeStudy) -> None:
    compare, runs = make_study(seeds=3)
    summaries = summarize(compare)
    assert [summary.gate for summary in summaries] == list(dict.fromkeys(run.gate for run in runs))
    mine = [run for run in runs if run.gate == summaries[1].gate]
    for key in ("loss", "bits_per_byte", "first_token_share", "gate_mean", "gate_below", "max_abs"):
        assert getattr(summaries[1], key) == pytest.approx(sum(getattr(run, key) for run in mine) / 3)
    assert summaries[1].perplexity == pytest.approx(math.exp(sum(run.loss or 0 for run in mine) / 3))
    assert summaries[1].parameters_change == pytest.approx(23 / 812_345)
    assert summaries[1].added == 0.0025
    assert (summaries[0].is_baseline, summaries[0].gate_mean, summaries[0].paired) == (True, None, None)


def test_the_baseline_comes_first(make_run: MakeRun, make_compare: MakeCompare) -> None:
    runs = [make_run("value:headwise:sigmoid"), make_run("none"), make_run("key:headwise:sigmoid")]
    assert [s.gate for s in summarize(make_compare(runs))] == ["none", "value:headwise:sigmoid", "key:headwise:sigmoid"]


def test_text_is_plain_and_has_every_number(make_study: MakeStudy) -> None:
    compare, _ = make_study()
    text = render_text(compare)
    assert re.fullmatch(r"[ -~\n]+", text)
    assert not re.search(r" $", text, re.M)
    for summary in summarize(compare):
        for column in columns(compare)[1:]:
            for piece in column.cell(summary).split("\n"):
                assert piece in text
    for line in verdict_lines(compare):
        assert line in re.sub(r"\n  ", " ", text)


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("gate", ["paper", LONG])
@pytest.mark.parametrize("parameters", [812_345, 1_234_567_891])
def test_text_fits_the_width(
    make_run: MakeRun, make_compare: MakeCompare, gate: str, swept: bool, parameters: int
) -> None:
    runs = [
        make_run(name, seed, parameters=parameters, largest_stable_lr=0.003 if swept else None)
        for name in ("none", gate)
        for seed in (0, 1, 2)
    ]
    compare = make_compare(runs)
    text = render_text(compare)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert ("stable" in text) == swept
    assert gate[:8] in text


@pytest.mark.parametrize("size", [7, 8, 11, 16, 400])
def test_folding_keeps_every_character(size: int) -> None:
    pieces = _fold(LONG, size)
    assert "".join(pieces) == LONG
    assert max(map(len, pieces)) <= size
    assert _fold("output:headwise", 11) == ["output:", "headwise"]


def test_perplexity_stands_in_where_tokens_have_no_bytes(make_run: MakeRun, make_compare: MakeCompare) -> None:
    runs = [make_run(gate, seed, bits_per_byte=None) for gate in ("none", "paper") for seed in (0, 1)]
    compare = make_compare(runs, metric="loss")
    keys = [column.key for column in columns(compare)]
    assert "perplexity" in keys
    assert "bits_per_byte" not in keys
    assert next(column for column in columns(compare) if column.key == "difference").title.startswith(
        "Difference in loss"
    )
    assert "(loss, 2 paired seeds)" in "".join(verdict_lines(compare))


def test_bits_per_byte_heads_the_table_and_loss_does_not_say_it_again(make_study: MakeStudy) -> None:
    compare, _ = make_study()
    extra = Paired(gate=compare.paired[0].gate, metric="loss", difference=-0.5, low=-0.6, high=-0.4, n=3)
    compare = dataclasses.replace(compare, paired=(*compare.paired, extra))
    assert summarize(compare)[1].paired == compare.paired[0]
    lines = verdict_lines(compare)
    assert sum(line.startswith(f"{extra.gate}:") for line in lines) == 1
    assert not any("(loss" in line for line in lines)
    other = dataclasses.replace(extra, metric="wer")
    assert any("(wer" in line for line in verdict_lines(dataclasses.replace(compare, paired=(*compare.paired, other))))


def test_a_null_result_and_one_seed_are_printed_as_such(make_study: MakeStudy) -> None:
    compare, _ = make_study(seeds=3)
    assert re.search(r"elementwise\S*: no difference shown: .* includes 0", " ".join(verdict_lines(compare)))
    single, _ = make_study(seeds=1)
    assert all("one seed: no interval" in line for line in verdict_lines(single))
    assert "(one seed)" in render_text(single)


def test_diverged_runs_are_left_out_and_counted(make_run: MakeRun, make_compare: MakeCompare) -> None:
    bad = {"diverged": True, "loss": math.nan, "bits_per_byte": math.inf, "max_abs": math.inf}
    runs = [make_run("none", seed) for seed in (0, 1)]
    some = [make_run("paper", 0), make_run("paper", 1, **bad)]
    summary = summarize(make_compare(runs + some))[1]
    assert (summary.loss, summary.diverged, summary.seeds) == (some[0].loss, 1, 2)
    assert "paper: 1 of 2 runs diverged; the means leave them out" in verdict_lines(make_compare(runs + some))

    every = make_compare(runs + [make_run("paper", seed, **bad) for seed in (0, 1)])
    text = render_text(every)
    assert "diverged" in text.splitlines()[6]
    assert "nothing to compare" in text
    assert "nan" not in text
    assert "inf" not in text


def test_the_smallest_stable_learning_rate_of_the_seeds_counts(make_run: MakeRun, make_compare: MakeCompare) -> None:
    runs = [make_run("none", seed, largest_stable_lr=rate) for seed, rate in enumerate((0.01, 0.003, None))]
    assert summarize(make_compare(runs))[0].largest_stable_lr == 0.003


def test_a_missing_baseline_leaves_dashes(make_run: MakeRun, make_compare: MakeCompare) -> None:
    compare = make_compare([make_run("paper", 0)])
    summary = summarize(dataclasses.replace(compare, paired=(), timing={}))[0]
    cells = {column.key: column.cell(summary) for column in columns(compare)}
    assert (cells["difference"], cells["step_time"]) == (DASH, DASH)


def test_a_pipe_gets_plain_text(make_study: MakeStudy) -> None:
    compare, _ = make_study()
    stream = io.StringIO()
    print_table(compare, stream)
    assert stream.getvalue() == render_text(compare)


def test_a_terminal_gets_the_same_text_in_colour(make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    compare, _ = make_study()
    stream = Terminal()
    print_table(compare, stream)
    assert "\x1b[1" in stream.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()) == render_text(compare)


@pytest.mark.parametrize("how", ["NO_COLOR", "no rich"])
def test_a_terminal_without_colour_gets_plain_text(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    compare, _ = make_study()
    stream = Terminal()
    print_table(compare, stream)
    assert stream.getvalue() == render_text(compare)
