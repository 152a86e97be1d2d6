"""The explorer's page in Gradio: inputs on one side, drawings on the other; every event changes the state and paints it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from gated_attn.cli.explorer import draw
from gated_attn.cli.explorer.state import Change, Explorer, State, choose
from gated_attn.errors import GatedAttnError
from gated_attn.hf.attach import gates

CSS = Path(__file__).parent / "explorer.css"

CLICKS = """
element.addEventListener('click', event => {
  const chosen = event.target.closest('[data-token], [data-head]');
  if (chosen) trigger('click', {...chosen.dataset});
});
let inside = false;
element.addEventListener('focusin', () => { inside = true; });
element.addEventListener('focusout', event => { if (event.relatedTarget) inside = false; });
watch('value', () => { if (inside) element.querySelector('[aria-pressed=true]')?.focus({preventScroll: true}); });
"""
"""A click on a drawing says what was clicked; drawn anew, it gives the focus back."""

MULTIPLY, SET = "multiply its output", "set its gate"


def theme() -> Any:
    """Gradio's plain theme in the fonts of the machine, so that none is fetched."""
    return gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], radius_size="sm")


@dataclass
class Parts:
    """What of the page changes: the state, and everything that `paint` fills."""

    state: Any
    text: Any
    target: Any
    read: Any
    strip: Any = None
    reading: Any = None
    looks: Any = None
    site: Any = None
    head: Any = None
    slider: Any = None
    how: Any = None
    changes: Any = None
    reset: Any = None
    next: Any = None
    gates: Any = None
    added: Any = None


PAINTED = (
    "state", "strip", "reading", "looks", "site", "head", "slider", "how", "changes", "reset", "next", "gates", "added",
)  # fmt: skip


def build(explorer: Explorer, text: str) -> Any:
    """The page, not yet served."""
    first = explorer.begin(text)
    with gr.Blocks(title=f"gated-attn explore {explorer.label}", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown(_headline(explorer))
        with gr.Row(equal_height=True):
            parts = Parts(
                gr.State(first),
                gr.Textbox(text, label="Text", lines=2, max_lines=8, scale=4, elem_id="text"),
                gr.Textbox(
                    "", label="Text of the decoder", lines=2, scale=3, visible=explorer.two_sides, elem_id="target"
                ),
                gr.Button("Read", variant="primary", scale=1, min_width=90, elem_id="read"),
            )
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                parts.strip, parts.reading, parts.looks = (_drawing(name) for name in ("strip", "reading", "looks"))
            with gr.Column(scale=2, min_width=300):
                _controls(parts, draw.options(first))
        with gr.Row():  # below each other on a phone, where cells would be too small for a finger
            with gr.Column(min_width=300):
                parts.gates = _drawing("gates")
            with gr.Column(min_width=300):
                parts.added = _drawing("added")
        _wire(explorer, page, parts)
    return page


def _controls(parts: Parts, options: list[tuple[str, str]]) -> None:
    with gr.Row():
        parts.site = gr.Dropdown(options, label="Layer", min_width=120, elem_id="site")
        parts.head = gr.Dropdown([0], label="Head", min_width=80, elem_id="head")
    parts.slider = gr.Slider(0, 2, value=1, step=0.05, elem_id="slider")
    parts.how = gr.Radio([MULTIPLY, SET], value=MULTIPLY, show_label=False, container=False, elem_id="how")
    parts.changes = _drawing("changes")
    parts.reset = gr.Button("Reset all heads", size="sm", elem_id="reset")
    parts.next = _drawing("next")


def _drawing(name: str) -> Any:
    return gr.HTML("", elem_id=name, elem_classes=["drawing"], js_on_load=CLICKS, apply_default_css=False)


def _headline(explorer: Explorer) -> str:
    there = {str(gate.spec) for gate in gates(explorer.model).values()}
    told = (
        f"Gates: `{'`, `'.join(sorted(there))}`"
        if there
        else "No gates: a slider multiplies what a head hands on, which is what an output gate of that value would do"
    )
    return f"### {explorer.label}\n{told}."


def _wire(explorer: Explorer, page: Any, parts: Parts) -> None:
    """What each event does to the state. One runs at a time, so that none undoes another's."""
    outputs = [getattr(parts, name) for name in PAINTED]

    def on(event: Any, change: Callable[..., State], *inputs: Any, keep: str = "") -> None:
        @functools.wraps(change)  # whose annotations say whether Gradio hands over an event's data
        def run(*given: Any) -> list[Any]:
            try:
                painted = paint(explorer, change(*given))
            except GatedAttnError as error:
                raise gr.Error(str(error), print_exception=False) from error
            # What the visitor is moving has gone on since.
            return [gr.skip() if name == keep else painted[name] for name in PAINTED]

        event(
            run, [*inputs, parts.state], outputs, show_progress="minimal", trigger_mode="always_last", concurrency_limit=1,
            concurrency_id="model", api_visibility="private",
        )  # fmt: skip

    def move(value: float, how: str, site: str, head: int, own: State) -> State:
        kind = "set" if how == SET else "scale"
        return explorer.change(own, (site, int(head)), Change(kind, round(float(value), 4)))

    for event in (parts.read.click, parts.text.submit, parts.target.submit):
        on(event, explorer.begin, parts.text, parts.target)
    on(parts.site.input, lambda site, own: choose(own, site=site), parts.site, keep="site")
    on(parts.head.input, lambda head, own: choose(own, head=int(head)), parts.head, keep="head")
    moved = (parts.slider, parts.how, parts.site, parts.head)
    on(parts.slider.input, move, *moved, keep="slider")
    on(parts.how.input, move, *moved, keep="how")
    on(parts.reset.click, explorer.reset)
    _wire_drawings(explorer, parts, on)

    on(page.load, lambda own: own)


def _wire_drawings(explorer: Explorer, parts: Parts, on: Callable[..., None]) -> None:
    def token(own: State, event: gr.EventData) -> State:
        return choose(own, place=int(event._data["token"]))

    def cell(own: State, event: gr.EventData) -> State:
        return choose(own, site=str(event._data["site"]), head=int(event._data["head"]))

    def undo(own: State, event: gr.EventData) -> State:
        return explorer.change(own, (str(event._data["site"]), int(event._data["head"])), None)

    on(parts.strip.click, token)
    on(parts.changes.click, undo)
    on(parts.gates.click, cell)
    on(parts.added.click, cell)


def paint(explorer: Explorer, own: State) -> dict[str, Any]:
    """What every part shows, in the order of `PAINTED`."""
    kind, whose = own.change.kind, f"{draw.name_of(own.seen)}, head {own.head}"
    label = (
        f"Gate of {whose}, set to" if kind == "set" else f"{'Gate' if own.seen.gate else 'Output'} of {whose}, times"
    )
    return {
        "state": own,
        "strip": draw.text_strip(own),
        "reading": draw.reading(own),
        "looks": draw.attention(own),
        "site": gr.update(choices=draw.options(own), value=own.site),
        "head": gr.update(choices=list(range(len(own.seen.added_HT))), value=own.head),
        "slider": gr.update(label=label, value=own.change.value),
        "how": gr.update(value=SET if kind == "set" else MULTIPLY, visible=not explorer.why_not_set(own.site)),
        "changes": draw.changes(own),
        "reset": gr.update(visible=bool(own.changes)),
        "next": draw.predicted(own, explorer.tokenizer, explorer.fills_masks),
        "gates": draw.gate_map(own),
        "added": draw.added_map(own),
    }
