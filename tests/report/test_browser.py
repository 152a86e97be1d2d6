"""Every kind of page in a real browser: nothing logged, nothing asked for, no wider than the window, and something to see."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gated_attn.records import CompareRecord, Diagnosis, RunRecord
from gated_attn.report.diagnosis import write_diagnosis_report
from gated_attn.report.health import write_health_report
from gated_attn.report.html import write_report
from gated_attn.report.transfer import write_transfer_report
from tests.report.browser import Browser
from tests.report.conftest import build_health, build_transfer

pytest.importorskip("jinja2")

MakeDiagnosis = Callable[..., Diagnosis]
MakeStudy = Callable[..., tuple[CompareRecord, list[RunRecord]]]
Write = Callable[[Path], Path]

SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("large", "one seed")]


@pytest.fixture(params=["diagnosis", "pair", "compare", "health", "transfer", *SLOW])
def write(request: pytest.FixtureRequest, make_diagnosis: MakeDiagnosis, make_study: MakeStudy) -> Write:
    """Writes one kind of page."""
    before, after = make_diagnosis((9,) * 4, gated=False, seed=1), make_diagnosis((9,) * 4, seed=2)
    kinds: dict[str, Write] = {
        "diagnosis": lambda path: write_diagnosis_report(make_diagnosis(), path, pictures=False),
        "pair": lambda path: write_diagnosis_report(after, path, before, pictures=False),
        "large": lambda path: write_diagnosis_report(
            make_diagnosis((64,) * 48, model="a-model-of-a-very-long-name/" * 4), path, pictures=False
        ),
        "compare": lambda path: write_report(*make_study(), path),
        "one seed": lambda path: write_report(*make_study(seeds=1), path),
        "health": lambda path: write_health_report(build_health(), path, pictures=False),
        "transfer": lambda path: write_transfer_report(build_transfer(), path, pictures=False),
    }
    return kinds[request.param]


def test_a_browser_shows_it_without_a_complaint(write: Write, browser: Browser, tmp_path: Path) -> None:
    path = write(tmp_path / "report.html")
    seen = {}
    for width, dark in ((1200, False), (390, True), (390, False)):
        browser.open(path, width=width, dark=dark)
        assert browser.complaints == []
        assert browser.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)"
        )
        seen[width, dark] = browser.screenshot(tmp_path / "page.png", whole=False).read_bytes()
        assert shades(seen[width, dark]) > 40
    assert seen[390, True] != seen[390, False]


def test_without_script_everything_is_there(write: Write, browser: Browser, tmp_path: Path) -> None:
    path = write(tmp_path / "report.html")
    browser.open(path, width=390, script=False)
    assert browser.complaints == []
    # Nothing but the controls of the script is hidden.
    assert browser.evaluate("[...document.querySelectorAll('[hidden]')].every((e) => e.matches('.controls'))")


@pytest.mark.parametrize("width", [390, 500, 700])
def test_the_comparisons_table_is_not_cut(browser: Browser, make_study: MakeStudy, tmp_path: Path, width: int) -> None:
    browser.open(write_report(*make_study(), tmp_path / "report.html"), width=width)
    box = browser.evaluate(
        "(() => { const e = document.querySelector('.scroll'); return [e.scrollWidth, e.clientWidth]; })()"
    )
    assert box[0] <= box[1]
    names = browser.evaluate(
        "[...document.querySelectorAll('.stacks td')].map((e) => getComputedStyle(e, '::before').content).slice(0, 2)"
    )
    assert names == ['"Parameters"', '"Validation loss"']


def test_a_reader_can_pick_a_head_and_tap_for_numbers(
    browser: Browser, make_diagnosis: MakeDiagnosis, tmp_path: Path
) -> None:
    diagnosis = make_diagnosis()
    browser.open(write_diagnosis_report(diagnosis, tmp_path / "report.html", pictures=False), width=390)
    view = diagnosis.view
    assert view is not None
    assert view.gates is not None
    told = browser.evaluate("""(() => {
      const view = document.querySelector(".view");
      for (const [name, value] of [[".pick-layer", "3"], [".pick-head", "2"]]) {
        view.querySelector(name).value = value;
        view.querySelector(name).dispatchEvent(new Event("change"));
      }
      view.querySelectorAll(".shown .tokens span")[1].click();
      const cell = [...document.querySelectorAll(".heat td")].find((e) => e.title.startsWith("layer 1, head 4"));
      cell.click();
      const drawing = document.querySelector(".pattern");
      drawing.scrollIntoView();
      const at = new DOMPoint(2.5, 5.5).matrixTransform(drawing.getScreenCTM());
      drawing.dispatchEvent(new MouseEvent("click", {clientX: at.x, clientY: at.y}));
      return [view.querySelector("output").textContent, cell.closest("figure").querySelector("output").textContent,
        document.querySelector("#weight").textContent];
    })()""")
    head = diagnosis.attention[1].heads[4]
    assert told == [
        f"ROMEO: {view.gates.values[2][1][1]:.3f} (layer 2, head 1)",
        f"layer 1, head 4: {head.first_token_share:.3f}",
        "query 5 ·soft on key 2 :: 0.167",
    ]
    assert browser.complaints == []


def test_a_definition_is_one_click_away(browser: Browser, make_diagnosis: MakeDiagnosis, tmp_path: Path) -> None:
    browser.open(write_diagnosis_report(make_diagnosis(), tmp_path / "report.html", pictures=False), width=390)
    place = browser.evaluate("""(() => {
      document.querySelector(".summary a").click();
      return document.querySelector("#def-first_token_share").getBoundingClientRect().top;
    })()""")
    assert 0 <= place < 900


def test_the_browser_tells_of_a_page_that_complains(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    bad = '<script>console.log("x"); nothing();</script><img src="https://127.0.0.1:9/x.png">'
    page.write_text(bad, encoding="utf-8")
    browser.open(page, width=390)
    assert len(browser.complaints) >= 3


def shades(png: bytes) -> int:
    """How many different values the picture's rows hold; a blank page has a handful."""
    data, at = b"", 8
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    return len(set(zlib.decompress(data)))
