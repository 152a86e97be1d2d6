"""The HTML report: one file, valid, escaped, the same every time, with every number of the table."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gated_attn.errors import MissingExtraError, RecordError
from gated_attn.records import CompareRecord, RunRecord, SampleGates
from gated_attn.report import table
from gated_attn.report.html import HEADS, LAYERS, TOKENS, render_html, write_report, write_run_report
from gated_attn.report.page import visible
from tests.report.pages import Page

pytest.importorskip("jinja2")

MakeRun = Callable[..., RunRecord]
MakeCompare = Callable[..., CompareRecord]
MakeStudy = Callable[..., tuple[CompareRecord, list[RunRecord]]]


def no_blanks(text: str) -> str:
    return re.sub(r"\s+", "", text)


def test_every_number_is_on_the_page(make_study: MakeStudy, tmp_path: Path) -> None:
    compare, runs = make_study()
    path = write_report(compare, runs, tmp_path / "out" / "report.html")
    page = Page(path.read_text(encoding="utf-8"))
    text = no_blanks("".join(page.text))
    for summary in table.summarize(compare):
        for column in table.columns(compare):
            assert no_blanks(column.cell(summary)) in text
            assert no_blanks(column.definition) in text
    for line in table.verdict_lines(compare):
        assert no_blanks(line) in text
    for run in runs:
        assert f"{run.loss:.4f}{run.bits_per_byte:.4f}{run.perplexity:.3f}" in text
    for told in ("optimizer.lr0.003", "optimizer.betas[0.9,0.95]", "versions.torch2.13.0", "threads2"):
        assert told in text
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_figures_are_there_and_named(make_study: MakeStudy) -> None:
    compare, runs = make_study(layers=2, heads=3)
    page = Page(render_html(compare, runs))
    assert len(page.named("svg", "histogram")) == 2 * 2 * 3
    assert len(page.named("svg", "figure")) == 5
    drawings = page.named("svg", "figure") + page.named("svg", "histogram")
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)
    # Three gates of three seeds, and their means, trained and validated; two gates' means and differences.
    assert len(page.named("path", "thin")) == 3 * 3 * 2 + 2 * 3 + 2 * 3
    assert len(page.named("article", "sample")) == 2


def test_nothing_comes_from_elsewhere(make_study: MakeStudy) -> None:
    text = render_html(*make_study())
    page = Page(text)
    assert "http" not in text.replace("http-equiv", "")
    assert not re.search(r"url\(|@import|\bimport\b|fetch|XMLHttp", text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "use", "image")
        assert not {"src", "href", "xlink:href", "srcset", "action"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    policy = [a for a in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert (policy[0]["content"] or "").startswith("default-src 'none'")


def test_it_follows_theme_and_width(make_study: MakeStudy) -> None:
    text = render_html(*make_study())
    assert "@media (prefers-color-scheme: dark)" in text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in Page(text).named("meta")
    assert Page(text).named("html")[0]["lang"] == "en"
    used, defined = (set(re.findall(pattern, text)) for pattern in (r"var\((--\w+)\)", r"(--\w+):"))
    assert used <= defined | {"--c"}


def test_the_same_records_give_the_same_bytes(make_study: MakeStudy) -> None:
    assert render_html(*make_study()) == render_html(*make_study())


def test_ids_are_unique_and_labels_resolve(make_study: MakeStudy) -> None:
    page = Page(render_html(*make_study()))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in page.tags if "aria-labelledby" in a} <= set(ids)


def test_hostile_text_stays_text(make_run: MakeRun, make_compare: MakeCompare) -> None:
    evil = "</script><script>alert(1)</script>\"'&<b>{{ 7*7 }}"
    tokens = (evil, "]]>", "<!--", "&lt;", "\ud800", "\0")
    environment = {evil: {evil: [evil]}}
    runs = [
        make_run(gate, seed, tokens=tokens, environment=environment, recipe={evil: evil})
        for gate in ("none", evil)
        for seed in (0, 1)
    ]
    compare = dataclasses.replace(make_compare(runs), recipe=evil)
    text = render_html(compare, runs)
    page = Page(text)
    assert [a.get("type") for a in page.named("script")] == ["application/json", None]
    assert not page.named("b") or all(re.fullmatch(r"\d\.\d\d", t) for t in re.findall(r"<b>(.*?)</b>", text))
    assert "alert(1)" not in "".join(page.scripts)
    assert evil in "".join(page.text)
    assert "{{ 7*7 }}" in html.unescape(text)
    assert "\0" not in text


@pytest.mark.parametrize(
    ("token", "shown", "ends_line"),
    [
        (" But", "·But", False),
        ("\n", "⏎", True),
        (".\n\n", ".⏎⏎", True),
        ("\t", "⇥", False),
        ("\x07", "⟨0007⟩", False),
        ("\u202e", "⟨202E⟩", False),
        ("\u200b", "⟨200B⟩", False),
        ("\u00a0", "⟨00A0⟩", False),
        ("\ud800", "⟨D800⟩", False),
        ("\u0301", "◌\u0301", False),
        ("", "∅", False),
        ("日本", "日本", False),
        ("<b>&", "<b>&", False),
    ],
)
def test_every_token_can_be_seen(token: str, shown: str, ends_line: bool) -> None:
    assert visible(token) == (shown, ends_line)


def test_tokens_are_shaded_by_the_mean_over_heads_and_carry_every_head(
    make_run: MakeRun, make_compare: MakeCompare
) -> None:
    sample = SampleGates(
        tokens=("a", "b"), values=(((0.25, 1.9), (0.75, 0.1)), ((0.5, 0.5), (0.5, -0.7))), layers=(3, 7)
    )
    runs = [make_run("none"), make_run("paper", sample=sample, histogram_range=(0.0, 2.0))]
    page = Page(render_html(make_compare(runs), runs))
    spans = [a for a in page.named("span") if a.get("style", "")]
    assert [(a["style"], a["title"]) for a in spans] == [
        ("--g:0.250", "0.500"),
        ("--g:0.500", "1.000"),
        ("--g:0.250", "0.500"),
        ("--g:0.000", "-0.100"),
    ]
    data = next(json.loads(script) for script in page.scripts if script.startswith("["))
    assert data == [[[500, 1000], [250, 1900], [750, 100]], [[500, -100], [500, 500], [500, -700]]]
    assert "layer 7" in "".join(page.text)
    assert [a["data-high"] for a in page.named("article", "sample")] == ["2.0"]


@pytest.mark.parametrize(("layers", "heads", "tokens"), [(1, 1, 1), (12, 16, 160), (13, 32, 167)])
def test_what_is_not_drawn_is_said(
    make_run: MakeRun, make_compare: MakeCompare, layers: int, heads: int, tokens: int
) -> None:
    runs = [make_run(gate, layers=layers, heads=heads, tokens=("x",) * tokens) for gate in ("none", "paper")]
    page = Page(render_html(make_compare(runs), runs))
    text = "".join(page.text)
    assert len(page.named("svg", "histogram")) == min(layers, LAYERS) * min(heads, HEADS)
    assert len([a for a in page.named("span") if a.get("style")]) == min(layers, LAYERS) * min(tokens, TOKENS)
    assert (f"12 of {layers} layers are drawn, evenly spaced." in text) == (layers > LAYERS)
    assert (f"16 of {heads} heads per layer are drawn" in text) == (heads > HEADS)
    assert (f"The first 160 of {tokens} tokens are drawn." in text) == (tokens > TOKENS)
    assert f"layer {layers - 1}" in text
    assert f"h{heads - 1} " in text


def test_runs_may_lack_everything_optional(make_run: MakeRun, make_compare: MakeCompare) -> None:
    bare = {"history": (), "gates": (), "sample": None, "environment": {}, "recipe": {}}
    runs = [make_run(gate, **bare) for gate in ("none", "paper")]
    for given in (runs, runs[:1], []):
        page = Page(render_html(make_compare(runs), given))
        assert not page.named("svg", "histogram")
        assert not page.named("article")
        assert "Curves over steps" not in "".join(page.text)
        assert "How it was made" not in "".join(page.text)
    alone = Page(render_html(make_compare(runs[:1]), runs[:1]))
    assert "compared" not in "".join(alone.text)


def test_diverged_runs_are_drawn_to_their_end(make_run: MakeRun, make_compare: MakeCompare) -> None:
    bad = {"diverged": True, "diverged_step": 310, "loss": math.nan, "bits_per_byte": None, "max_abs": math.inf}
    history = make_run("paper").history[:12]
    runs = [make_run("none", seed) for seed in (0, 1)]
    runs += [make_run("paper", seed, history=history, **bad) for seed in (0, 1)]
    page = Page(render_html(make_compare(runs), runs))
    text = "".join(page.text)
    assert len(page.named("path", "cross")) == 3 * 2
    assert "paper, seed 1: diverged at step 310" in text
    assert "2 of 2 runs diverged" in text
    assert "nothing to compare" in text
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_the_first_seed_that_finished_shows_its_gates(make_run: MakeRun, make_compare: MakeCompare) -> None:
    runs = [make_run("none", 5), make_run("paper", 5, diverged=True), make_run("paper", 11), make_run("paper", 7)]
    page = Page(render_html(make_compare(runs), runs))
    assert re.search(r"paper\s+seed 7", "".join(page.text))
    assert not re.search(r"paper\s+seed (5|11)\b", "".join(page.text))


def test_a_run_of_another_comparison_is_refused(make_run: MakeRun, make_compare: MakeCompare) -> None:
    runs = [make_run("none"), make_run("paper")]
    with pytest.raises(RecordError, match=r"\['paper-seed0'\] have gates that the comparison does not list"):
        render_html(make_compare(runs[:1]), runs)


def test_without_jinja_it_says_what_to_install(make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"gated-attn\[lab\]"):
        render_html(*make_study())


def test_one_seed_is_not_worded_as_several(make_study: MakeStudy) -> None:
    one, three = ("".join(Page(render_html(*make_study(seeds=n))).text) for n in (1, 3))
    for told in ("mean over seeds", "Mean over seeds", "95 % interval", "thick line", "seeds that finished"):
        assert told not in one
        assert told in three
    for told in ("on one seed (dot)", "One seed has no interval", "one seed: no interval (difference"):
        assert " ".join(told.split()) in " ".join(one.split())
        assert told not in three


def test_a_run_alone_has_a_report(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("paper", history=make_run("paper").history)
    page = Page(write_run_report(run, tmp_path / "report.html").read_text(encoding="utf-8"))
    text = "".join(page.text)
    assert "paper-seed0: gate paper" in text
    assert "compared" not in text
    assert "Difference" not in text
    assert "baseline" not in text.replace("relative to the baseline", "").replace("than the baseline", "")
    assert f"{run.loss:.4f}" in text
    assert len(page.named("svg", "figure")) == 3  # losses trained and validated, gate mean
