"""The report of a diagnosis: every number, its definition, its text; self-contained; escaped; the same bytes again."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gated_attn.errors import MissingExtraError, RecordError
from gated_attn.records import AttentionStat, Diagnosis, TokenView
from gated_attn.report import heatmap, maps, terms
from gated_attn.report.diagnosis import basis, pictures_of, render_diagnosis, write_diagnosis_report
from gated_attn.report.heatmap import Cell, Grid, Row
from tests.report.conftest import DEFINITIONS, build_gate, build_head
from tests.report.pages import Page

pytest.importorskip("jinja2")

MakeDiagnosis = Callable[..., Diagnosis]


def text_of(page: Page) -> str:
    return " ".join("".join(page.text).split())


def test_every_head_and_every_number_is_there(make_diagnosis: MakeDiagnosis) -> None:
    diagnosis = make_diagnosis()
    page = Page(render_diagnosis(diagnosis))
    titles = {a.get("title") for a in page.named("td")}
    for module in diagnosis.attention:
        for head in module.heads:
            dead = " (dead)" if head.dead else ""
            for term in (*terms.HEADS, *terms.MORE_HEADS):
                number = terms.written(getattr(head, term.key), term.form)
                assert f"layer {module.layer}, head {head.head}: {number}{dead}" in titles
    text = text_of(page)
    for name, value in diagnosis.summary().items():
        assert terms.written(value, next(t.form for t in terms.SUMMARY if t.key == name)) in text
    for gate in diagnosis.gates:
        assert f"{gate.by_class['punctuation']:.3f}" in text
    for stream in diagnosis.streams:
        assert terms.written(stream.kurtosis, "size") in text
    assert "1 dead: layer 1 head 1." in text
    for told in (
        "812,345 parameters",
        "float32",
        "sdpa",
        "T = 64 tokens, eps = 0.3",
        "3.5 s, 1.5 s unwatched, 7 MiB more",
    ):
        assert told in text


def test_no_number_is_without_its_definition_and_text(make_diagnosis: MakeDiagnosis) -> None:
    diagnosis = make_diagnosis()
    page = Page(render_diagnosis(diagnosis))
    ids = {a["id"] for _, a in page.tags if "id" in a}
    links = [a["href"] or "" for a in page.named("a")]
    assert links
    assert {link.removeprefix("#") for link in links} <= ids
    text = text_of(page)
    for told in DEFINITIONS.values():
        assert told in text
    assert basis(diagnosis) == "Text: a poem, sha256 0123456789ab; 120 tokens in 2 sequences of 53 to 67"
    pictures = len(page.named("article", "picture"))
    assert pictures == 4 + 5 + 1 + 6
    assert text.count(basis(diagnosis)) >= pictures + 4
    assert "this record does not define it" in text  # kurtosis, which these definitions leave out


def test_columns_and_summary_all_lead_to_a_definition(make_diagnosis: MakeDiagnosis) -> None:
    text = render_diagnosis(make_diagnosis())
    for table in re.findall(r'<table class="(?:pinned|summary)">.*?</table>', text, flags=re.S):
        heads = re.findall(r'<th scope="col">(.*?)</th>', table)
        plain = {head for head in heads if not head.startswith('<a href="#def-')}
        assert plain <= {"Layer", "Kind", "Heads", "Gate", "Number", "value", "before", "after", "difference"}


def test_nothing_comes_from_elsewhere(make_diagnosis: MakeDiagnosis) -> None:
    text = render_diagnosis(make_diagnosis(), make_diagnosis(seed=1))
    page = Page(text)
    assert "http" not in text.replace("http-equiv", "")
    assert not re.search(r"url\(|@import|\bimport\b|fetch|XMLHttp", text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "use", "image")
        assert not {"src", "xlink:href", "srcset", "action"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    policy = [a for a in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert (policy[0]["content"] or "").startswith("default-src 'none'")
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in page.tags if "aria-labelledby" in a} <= set(ids)
    used, defined = (set(re.findall(pattern, text)) for pattern in (r"var\((--\w+)\)", r"(--\w+):"))
    assert used <= defined | {"--c"}


def test_hostile_text_stays_text(make_diagnosis: MakeDiagnosis) -> None:
    evil = "</script><script>alert(1)</script>\"'&<b>{{ 7*7 }}"
    tokens = (evil, "]]>", "<!--", "&lt;", "\ud800", "\0", " ")
    diagnosis = make_diagnosis(
        tokens=tokens, model=evil, text=evil, dtype=evil, attn_implementation=evil, environment={evil: {evil: [evil]}},
        definitions={"first_token_share": evil, evil: evil},
    )  # fmt: skip
    first = diagnosis.attention[0]
    head = dataclasses.replace(first.heads[0], strongest_token=evil, strongest_share=1.0)
    module = AttentionStat(name=f"{evil}.0.self_attn", layer=0, kind=evil, queries=3, heads=(head, *first.heads[1:]))
    gate = dataclasses.replace(diagnosis.gates[0], name=f"{evil}.attn_gate", spec=evil, by_class={evil: 0.5})
    diagnosis = dataclasses.replace(diagnosis, attention=(module, *diagnosis.attention[1:]), gates=(gate,))
    text = render_diagnosis(diagnosis)
    page = Page(text)
    assert {a.get("type") for a in page.named("script")} == {"application/json", None}
    assert "alert(1)</script" not in text
    assert len([a for a in page.named("script") if a.get("type") is None]) == 1
    assert evil in "".join(page.text)
    assert "\0" not in text


def test_before_and_after_stand_side_by_side(make_diagnosis: MakeDiagnosis) -> None:
    before, after = make_diagnosis(gated=False, seed=1), make_diagnosis((3, 5, 2), seed=2)
    page = Page(render_diagnosis(after, before))
    text = text_of(page)
    change = after.entropy - before.entropy  # type: ignore[operator]
    assert f"Attention entropy{before.entropy:.3f}{after.entropy:.3f}{change:+.3f}" in text.replace(" ", "").replace(
        "Attentionentropy", "Attention entropy"
    )
    old, new = before.attention[2].heads[1].entropy, after.attention[2].heads[1].entropy
    assert f"layer 2, head 1: {new - old:+.3f}" in {a.get("title") for a in page.named("td")}  # type: ignore[operator]
    shares = next(picture for picture in pictures_of(after, before) if picture.key == "first_token_share")
    assert [grid.heading for grid in shares.grids] == ["before", "after", "difference"]
    assert {(grid.low, grid.high) for grid in shares.grids if not grid.signed} == {(0.0, 1.0)}
    means = next(picture for picture in pictures_of(after, before) if picture.key == "mean")
    assert [grid.heading for grid in means.grids] == ["after"]
    assert len(page.named("svg", "pattern")) == 4


def test_unlike_texts_are_refused(make_diagnosis: MakeDiagnosis, tmp_path: Path) -> None:
    other = make_diagnosis(text="another poem, sha256 ba9876543210")
    with pytest.raises(RecordError, match="these two do not compare: text is 'another poem"):
        write_diagnosis_report(make_diagnosis(), tmp_path / "report.html", other)
    assert not list(tmp_path.iterdir())


def test_self_and_cross_attention_are_apart(make_diagnosis: MakeDiagnosis) -> None:
    diagnosis = make_diagnosis(gated=False)
    own = [dataclasses.replace(m, name=f"model.decoder.layers.{m.layer}.self_attn") for m in diagnosis.attention]
    cross = [dataclasses.replace(m, name=f"model.decoder.layers.{m.layer}.encoder_attn", kind="cross") for m in own]
    there = [dataclasses.replace(m, name=f"model.encoder.layers.{m.layer}.self_attn") for m in own]
    diagnosis = dataclasses.replace(diagnosis, attention=[*there, *own, *cross])
    assert list(maps.by_kind(diagnosis)) == [
        "self attention, model.encoder.layers.*.self_attn",
        "self attention, model.decoder.layers.*.self_attn",
        "cross attention, model.decoder.layers.*.encoder_attn",
    ]
    text = text_of(Page(render_diagnosis(diagnosis)))
    assert "layer 1 head 1 (cross)" in text
    assert maps.pattern("h.11.attn") == "h.*.attn"
    assert maps.pattern("layers.0.attention#3") == "layers.*.attention"
    assert maps.pattern("layer1.mha2") == "layer1.mha2"


def test_layers_may_differ_in_heads_and_lack_numbers(make_diagnosis: MakeDiagnosis) -> None:
    diagnosis = make_diagnosis((2, 7), gated=False)
    grid = pictures_of(diagnosis)[0].grids[0]
    assert [len([cell for cell in row.cells if cell]) for row in grid.rows] == [2, 7]
    chosen = [build_head(number, random.Random(0), sink_rate=None) for number in (4, 9)]
    module = dataclasses.replace(diagnosis.attention[0], heads=chosen)
    picture = pictures_of(dataclasses.replace(diagnosis, attention=[module]))[1]
    assert picture.grids[0].columns == ("4", "9")
    assert heatmap.html(picture.grids[0]).count('class="none"') == 2


def test_a_bare_diagnosis_has_a_report(make_diagnosis: MakeDiagnosis) -> None:
    for view in (None, TokenView(tokens=())):
        diagnosis = make_diagnosis(
            gated=False, streams=(), view=view, definitions={}, seconds=None, environment={}, plain_seconds=None
        )
        page = Page(render_diagnosis(diagnosis))
        assert not page.named("article", "view")
        assert not page.named("svg")
        assert "Gates" not in [line.strip() for line in page.text]


def test_a_large_model_keeps_its_cells_and_stays_small(make_diagnosis: MakeDiagnosis) -> None:
    text = render_diagnosis(make_diagnosis((64,) * 48, gated=False))
    assert text.count("layer 47, head 63:") == 9
    assert 'class="heat narrow"' in text
    assert len(text) < 3_500_000


def test_over_the_text_the_script_has_every_head(make_diagnosis: MakeDiagnosis) -> None:
    diagnosis = make_diagnosis(gated=False, tokens=("a", "b"))
    page = Page(render_diagnosis(diagnosis))
    assert diagnosis.view is not None
    assert diagnosis.view.first is not None
    values = diagnosis.view.first.values
    data = json.loads(page.scripts[1])
    assert data[2][1:] == [[round(v * 1000) for v in row] for row in values[1]]
    assert data[1][0] == [round(sum(row[t] for row in values[0]) / len(values[0]) * 1000) for t in (0, 1)]  # type: ignore[misc]
    spans = [a for a in page.named("span") if "--g" in (a.get("style") or "")]
    assert len(spans) == 2 * (1 + len(values))


@pytest.mark.parametrize(
    ("value", "signed", "text"),
    [
        (0.0, False, "0"),
        (0.4137, False, ".41"),
        (0.996, False, "1"),
        (1.04, False, "1"),
        (12.34, False, "12.3"),
        (99.6, False, "100"),
        (23456.0, False, "2e4"),
        (0.5, True, "+.50"),
        (-0.126, True, "−.13"),
        (-0.001, True, "0"),
        (-6.75, True, "−6.8"),
    ],
)
def test_cells_are_short(value: float, signed: bool, text: str) -> None:
    assert heatmap.short(Grid("", (), (), signed=signed), value) == text


def test_a_difference_is_paired_by_module_and_head() -> None:
    before = Grid("before", ("0",), (Row("1", (Cell(0.5, "head 0"),), "a"), Row("1", (Cell(0.1, "head 0"),), "b")))
    after = Grid("after", ("0",), (Row("1", (Cell(0.7, "head 0"),), "b"), Row("1", (Cell(None, "head 0"),), "a")))
    made = heatmap.difference(before, after)
    assert made is not None
    assert [[cell and cell.value for cell in row.cells] for row in made.rows] == [[pytest.approx(0.6)], [None]]
    assert (made.low, made.high) == (pytest.approx(-0.6), pytest.approx(0.6))
    assert heatmap.difference(before, dataclasses.replace(after, rows=(Row("1", (Cell(1.0, "head 0"),), "c"),))) is None


def test_gates_of_value_heads_have_their_own_picture(make_diagnosis: MakeDiagnosis) -> None:
    draw = random.Random(3)
    gates = [build_gate(i, 2, draw, f"model.layers.{i}.self_attn.value_gate") for i in range(3)]
    diagnosis = make_diagnosis()
    picture = pictures_of(dataclasses.replace(diagnosis, gates=(*diagnosis.gates, *gates)))[-1]
    assert [name for name, _ in picture.groups] == [
        "model.layers.*.self_attn.attn_gate",
        "model.layers.*.self_attn.value_gate",
    ]


def test_the_same_records_give_the_same_text(make_diagnosis: MakeDiagnosis) -> None:
    assert render_diagnosis(make_diagnosis()) == render_diagnosis(make_diagnosis())


def test_pngs_lie_beside_the_page(make_diagnosis: MakeDiagnosis, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    tokens = ("$x_{", "日本", "\u0301", " ", "\n", "$y}$")
    before, after = make_diagnosis((2, 3), gated=False, tokens=tokens), make_diagnosis((2, 3), tokens=tokens, seed=1)
    write_diagnosis_report(after, tmp_path / "report.html", before)
    keys = "entropy first-token-share gate-mean outliers output-norm patterns sink-rate text-first text-gates"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"report-{key}.png" for key in keys.split()),
        "report.html",
    ]
    for path in tmp_path.glob("*.png"):
        with image.open(path) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 50


def test_the_same_grids_give_the_same_bytes() -> None:
    png = pytest.importorskip("gated_attn.report.png")
    pytest.importorskip("matplotlib")
    grid = Grid(
        "$a_", ("0", "1"), (Row("0", (Cell(0.25, "x", marked=True), None)), Row("1", (Cell(None, "y"), Cell(1.0, "z"))))
    )
    assert png.heatmaps("t", "n" * 200, [("g", [grid])]) == png.heatmaps("t", "n" * 200, [("g", [grid])])


@pytest.mark.parametrize(
    ("package", "told"), [("matplotlib", "PNGs needs matplotlib"), ("jinja2", "report needs jinja2")]
)
def test_without_a_package_it_says_what_to_install(
    make_diagnosis: MakeDiagnosis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, told: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{told}.*gated-attn\[lab\]"):
        write_diagnosis_report(make_diagnosis(), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
    if package == "matplotlib":
        write_diagnosis_report(make_diagnosis(), tmp_path / "report.html", pictures=False)
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
