"""The explorer: its state and drawings over tiny models, and its page driven in a real browser."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gated_attn import attach
from gated_attn.cli.explore import run
from gated_attn.cli.explorer import draw
from gated_attn.cli.explorer.state import Change, Explorer, choose
from gated_attn.errors import MissingExtraError, RecipeError, SpecError, UnsupportedError
from tests.hf import tiny
from tests.hf.tiny import spread, wake
from tests.measure.test_explore import words
from tests.report.browser import CHROMIUM, Browser

HERE, OTHER = "model.layers.1.self_attn", "model.layers.0.self_attn"
TEXT = "w3 w5 w7 w5"


def explorer(name: str = "llama", spec: str = "") -> Explorer:
    model = spread(tiny.build(name))
    return Explorer(wake(attach(model, spec), std=1.0) if spec else model, words(), f"tiny {name}")


def test_a_head_is_changed_and_changed_back() -> None:
    made = explorer()
    first = made.begin(TEXT)
    assert first.after is first.before
    shut = made.change(first, (HERE, 2), Change("scale", 0.0))
    assert not torch.equal(shut.after.predicted.log_V, first.before.predicted.log_V)
    assert not shut.after.sites[HERE].added_HT[2].any()
    assert made.change(shut, (HERE, 2), Change("scale", 0.0)) is shut
    for back in (
        made.change(shut, (HERE, 2), None),
        made.change(shut, (HERE, 2), Change("scale", 1.0)),
        made.reset(shut),
    ):
        assert back.after is first.before
    both = made.change(shut, (OTHER, 1), Change("scale", 2.0))
    assert list(both.changes) == [(HERE, 2), (OTHER, 1)]
    again = made.begin("w8 w9", state=both)
    assert again.changes == both.changes
    assert again.after is not again.before
    assert again.before.tokens["text"] == ("w8", "w9")


def test_a_gate_is_set_where_it_can_be() -> None:
    made = explorer(spec="output:headwise")
    first = made.begin(TEXT)
    assert made.why_not_set(HERE) == ""
    state = made.change(first, (HERE, 2), Change("set", 1.0))
    assert (state.after.sites[HERE].gate_HT[2] == 1).all()
    both = made.change(state, (HERE, 1), Change("scale", 0.0))
    assert not both.after.sites[HERE].added_HT[1].any()
    assert "gate set to 1.00" in draw.changes(both)
    assert "no attached gate" in explorer().why_not_set(HERE)
    with pytest.raises(SpecError, match="no head 9"):
        made.change(first, (HERE, 9), Change("set", 0.5))


def test_what_is_looked_at_stays_within_what_is_there() -> None:
    made = explorer()
    state = choose(made.begin(TEXT), site=HERE, head=3, place=99)
    assert (state.site, state.head, state.place) == (HERE, 3, 3)
    assert choose(state, head=77).head == 3
    shorter = made.begin("w8 w9", state=state)
    assert (shorter.site, shorter.head, shorter.place) == (HERE, 3, 1)


def test_every_drawing_says_the_numbers() -> None:
    made = explorer(spec="output:headwise")
    state = choose(made.begin(TEXT), site=HERE, head=2, place=1)
    site = state.before.sites[HERE]
    strip = draw.text_strip(state)
    for t, token in enumerate(TEXT.split()):
        assert f'title="token {t}: gate {site.gate_HT[2, t]:.3f}">{token}</button>' in strip
    assert strip.count('aria-pressed="true"') == 1
    looks = draw.attention(state)
    for s, weight in enumerate(site.weights(1)[2].tolist()):
        assert f'title="token {s}: {weight:.3f}"' in looks
    assert looks.count("bar none") == 2  # the two that come later
    for drawing, values in ((draw.gate_map(state), site.gate_HT), (draw.added_map(state), site.added_HT)):
        assert len(re.findall("<button", drawing)) == 2 * 4
        for head in range(4):
            assert re.search(rf"layer 1, head {head}: (gate|adds) {values[head, 1]:.3f}", drawing)
    assert f"{site.added_HT[2, 1]:.2f}" in draw.reading(state)
    top = state.before.predicted.log_V.exp().max()
    assert f"{top:.1%}" in draw.predicted(state, made.tokenizer, False)
    assert "→" not in draw.predicted(state, made.tokenizer, False)
    assert "→" in draw.predicted(made.change(state, (HERE, 2), Change("scale", 0.0)), made.tokenizer, False)


def test_layers_without_a_gate_and_models_without_any() -> None:
    model = wake(attach(spread(tiny.build("llama")), "output:headwise", layers=[1]))
    state = Explorer(model, words(), "some").begin(TEXT)
    assert "layer 0, head 3: no gate" in draw.gate_map(state)
    assert "Share on the first token of layer 0" in draw.text_strip(state)
    assert "Gate of layer 1" in draw.text_strip(choose(state, site=HERE))
    assert "Share on the first token of every head" in draw.gate_map(explorer().begin(TEXT))


def test_masked_language_models_encoders_and_two_sides() -> None:
    bert = explorer("bert")
    state = bert.begin("w3 [MASK] w5")
    assert (bert.fills_masks, state.place) == (True, 1)
    assert "[MASK]" in bert.example()
    assert "at the mask" in draw.predicted(state, bert.tokenizer, True)
    assert "Write [MASK]" in draw.predicted(bert.begin(TEXT), bert.tokenizer, True)
    body = Explorer(bert.model.bert, bert.tokenizer, "encoder")
    assert "predicts no tokens" in draw.predicted(body.begin(TEXT), body.tokenizer, body.fills_masks)
    t5 = explorer("t5")
    state = t5.begin(TEXT, "w8")
    assert t5.two_sides
    assert [label for label, _ in draw.options(state)] == [
        "layer 0", "layer 1", "decoder layer 0", "decoder layer 0, cross", "decoder layer 1", "decoder layer 1, cross",
    ]  # fmt: skip
    cross = choose(state, site="decoder.block.1.layer.1.EncDecAttention", place=1)
    assert cross.places == {"text": 3, "target": 1}
    assert draw.attention(cross).count('class="bar"') == 4
    assert draw.text_strip(cross).count("<button") == 2


def test_tokens_are_escaped_and_blanks_shown() -> None:
    assert draw.visible("<b>&\"'") == "&lt;b&gt;&amp;&quot;&#x27;"
    assert [draw.visible(token) for token in ("", " ", "\n\t", " a")] == ["∅", "␣", "⏎⇥", " a"]
    assert draw.bare(" a") == "a"


def test_what_reads_no_text_is_refused() -> None:
    with pytest.raises(RecipeError, match="x has no tokenizer"):
        Explorer(tiny.build("llama"), None, "x")
    with pytest.raises(UnsupportedError, match="x reads pixel_values"):
        Explorer(tiny.build("vit"), words(), "x")


def test_without_gradio_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gated-attn\[explore\]'"):
        run("smollm2", None, "127.0.0.1", 0, "auto", browser=False)


# --- the page in a browser ---

SERVER = """
import ipaddress, json, socket, sys

def outside(host):
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host not in ("localhost", socket.gethostname())

def watch(event, given):  # sockets of every library, whatever it is written in Python with
    host = None
    if event == "socket.getaddrinfo":
        host = given[0]
    elif event == "socket.connect" and isinstance(given[1], tuple):
        host = given[1][0]
    if host and outside(host):
        print("LEFT", event, host, flush=True)

sys.addaudithook(watch)
from gated_attn.cli import main
main()
"""


class Local(Browser):
    """A browser that complains of every address but the page's own."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def _note(self, event: dict[str, Any]) -> None:
        request = event["params"].get("request", {}).get("url", "")
        if not (event["method"] == "Network.requestWillBeSent" and request.startswith((self.address, "blob:"))):
            super()._note(event)

    def show(self, *, width: int = 1280, dark: bool = False) -> None:
        self.open(self.address, width=width, dark=dark)
        self.until("document.querySelectorAll('#next .both').length == 10")

    def until(self, condition: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never: {condition}; it says {self.evaluate('document.body.innerText')}"
            time.sleep(0.1)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is there."""
        x, y = self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); "
            f"return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def write(self, selector: str, text: str) -> None:
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self._call("Input.insertText", text=text)


Serve = Callable[..., tuple[str, "subprocess.Popen[str]", Path]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start the command on a model; its address, its process and what it prints."""
    if importlib.util.find_spec("gradio") is None or CHROMIUM is None:
        pytest.skip("needs Gradio and Chromium")
    started: list[subprocess.Popen[str]] = []

    def start(model: Any, *options: str) -> tuple[str, subprocess.Popen[str], Path]:
        folder, log = tmp_path / "model", tmp_path / "log"
        model.save_pretrained(folder)
        words().save_pretrained(folder)
        command = [sys.executable, "-c", SERVER, "explore", str(folder), "--text", TEXT, *options]
        surroundings = os.environ | {"GRADIO_SHARE": "True", "GRADIO_SERVER_NAME": "0.0.0.0"}
        with log.open("w") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=surroundings))
        end = time.monotonic() + 120
        while not (found := re.search(r"the page: (http://\S+/) ", log.read_text())):
            assert started[-1].poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        return found[1], started[-1], log

    yield start
    for process in started:
        process.terminate()
        process.wait(timeout=30)


def gated() -> Any:
    return wake(attach(spread(tiny.build("llama")), "output:headwise:2sigmoid"), std=1.0)


@pytest.mark.slow
def test_the_page_in_a_browser(serve: Serve, tmp_path: Path) -> None:
    address, process, log = serve(gated())
    with Local(address) as page:
        page.show()
        before = page.text("#next")
        page.click(f"#gates [data-site='{HERE}'][data-head='2']")
        page.until("document.querySelector('#slider').innerText.includes('Gate of layer 1, head 2, times')")
        page.click("#strip [data-token='1']")
        page.until("document.querySelector('#looks').innerText.startsWith('From w5, layer 1, head 2')")
        page.evaluate("document.querySelector('#slider input[type=range]').focus()")
        for _ in range(5):
            page.press("ArrowLeft", 37)
        page.until("document.querySelector('#changes').innerText.includes('layer 1, head 2: × 0.75')")
        assert page.evaluate("document.querySelector('#slider input[type=range]').value") == "0.75"
        changed = page.text("#next")
        assert "→" in changed
        assert "→" not in before
        page.click("#how label:last-child")
        page.until("document.querySelector('#changes').innerText.includes('gate set to 0.75')")
        page.until("document.querySelector('#reading').innerText.includes('gate 0.750')")
        page.screenshot(tmp_path / "light.png")
        page.click("#changes .undo")
        page.until("document.querySelector('#changes').innerText.includes('No head is changed')")
        assert page.text("#next") == before
        page.write("#text textarea", "w9 w1 w0 w8 w8")
        page.click("#read")
        page.until("document.querySelectorAll('#strip .tok').length == 5")
        assert page.text("#next") != before
        page.write("#text textarea", "   ")
        page.click("#read")
        page.until("document.body.innerText.includes('the text has no tokens')")
        assert page.complaints == []
        listening = [one.laddr.ip for one in psutil.Process(process.pid).net_connections() if one.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
    assert "LEFT" not in log.read_text()


@pytest.mark.slow
def test_the_page_on_a_phone_at_night_with_text_that_looks_like_markup(serve: Serve, tmp_path: Path) -> None:
    model = spread(tiny.build("bert"))
    address, _, _ = serve(model, "--text", "w3 [MASK] w5")
    with Local(address) as page:
        page.show(width=390, dark=True)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        gates, added = (
            page.evaluate(f"document.querySelector('#{name} .map').getBoundingClientRect().toJSON()")
            for name in ("gates", "added")
        )
        assert added["top"] > gates["bottom"]
        assert page.evaluate("document.body.classList.contains('dark')")
        assert "at the mask" in page.text("#next")
        assert not page.evaluate("Boolean(document.querySelector('#how')?.offsetParent)")
        page.screenshot(tmp_path / "phone.png")
        page.write("#text textarea", "{{value}} ${1+1} <img/src=x/onerror=console.log(1)> [MASK]")
        page.click("#read")
        page.until("document.querySelectorAll('#strip .tok').length == 4")
        assert page.complaints == []
