"""The explorer's pictures as HTML: pure functions of a state. What can be clicked says in `data-` attributes what it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from torch import Tensor

from gated_attn.cli.explorer.state import State
from gated_attn.measure.explore import Site, shift
from gated_attn.measure.texts import written

NEXT = 10


def name_of(site: Site) -> str:
    """What a site is called on the page."""
    side, kind = "decoder " if site.queries == "target" else "", ", cross" if site.kind == "cross" else ""
    return f"{side}layer {site.layer}{kind}"


def shade(site: Site) -> tuple[str, Tensor]:
    """(what a site's tokens are coloured by, its values (H, T)): its gate, or else the share on the first token."""
    if site.gate_HT is not None:
        return "gate", site.gate_HT
    return "share on the first token", site.first_HT


def text_strip(state: State) -> str:
    """The tokens that the chosen site's queries are of, coloured by the chosen head's gate."""
    site, head = state.seen, state.head
    what, values_HT = shade(site)
    top = max(1.0, float(values_HT.max()))
    tokens = state.after.tokens[site.queries]
    buttons = "".join(
        f'<button type="button" class="tok" style="--v:{_part(value, top)}" data-token="{t}" '
        f'aria-pressed="{_yes(t == state.place)}" title="token {t}: {what} {value:.3f}">{visible(token)}</button>'
        for t, (token, value) in enumerate(zip(tokens, values_HT[head].tolist(), strict=True))
    )
    return (
        f'<p class="what">{_upper(what)} of {name_of(site)}, head {head}, at each token; click one to see where it looks.</p>'
        f'<div class="strip">{buttons}</div>{_scale("amber", top)}'
    )


def attention(state: State) -> str:
    """Where the chosen head looks from the chosen token: a bar over each token that it may see."""
    site = state.seen
    weights_S = site.weights(state.place)[state.head]
    keys, token = state.after.tokens[site.keys], state.after.tokens[site.queries][state.place]
    top = max(float(weights_S.max()), 1e-9)
    columns = "".join(
        f'<span class="bar{"" if value else " none"}" title="token {s}: {value:.3f}"><i style="--v:{value / top:.3f}"></i>'
        f"<b>{visible(key)}</b></span>"
        for s, (key, value) in enumerate(zip(keys, weights_S.tolist(), strict=True))
    )
    most = ", ".join(
        f"<b>{bare(keys[s])}</b> {weights_S[s]:.2f}" for s in weights_S.topk(min(3, len(keys))).indices.tolist()
    )
    rest = 1 - float(weights_S.sum())
    sink = f"; {rest:.2f} on the model's own sink" if rest > 0.005 else ""
    return (
        f'<p class="what">From <b>{bare(token)}</b>, {name_of(site)}, head {state.head} looks at {most}{sink}. '
        f'The tallest bar is {top:.2f}; weights before any gate.</p><div class="strip bars">{columns}</div>'
    )


def reading(state: State) -> str:
    """The chosen head at the chosen token, in one line."""
    site, head, t = state.seen, state.head, state.place
    what, values_HT = shade(site)
    added_T, was_T = site.added_HT[head], state.before.sites[state.site].added_HT[head]
    before = f" (unchanged: {was_T[t]:.2f})" if abs(added_T[t] - was_T[t]) > 0.005 else ""
    token = bare(state.after.tokens[site.queries][t])
    return (
        f'<p class="what">At <b>{token}</b>: {what} <b>{values_HT[head, t]:.3f}</b>, '
        f"adds a vector of norm <b>{added_T[t]:.2f}</b>{before} to the residual stream.</p>"
    )


def gate_map(state: State) -> str:
    """Every head's gate at the chosen token."""
    sites = list(state.after.sites.values())
    gated = any(site.gate_HT is not None for site in sites)
    values = [(site.gate_HT if gated else site.first_HT) for site in sites]
    what = "gate" if gated else "share on the first token"
    at = [
        None if value is None else value[:, state.places[site.queries]]
        for site, value in zip(sites, values, strict=True)
    ]
    top = max(1.0, *(float(value.max()) for value in at if value is not None))
    return _map(state, f"{_upper(what)} of every head at this token", what, at, top, "amber")


def added_map(state: State) -> str:
    """What every head adds at the chosen token."""
    sites = list(state.after.sites.values())
    at = [site.added_HT[:, state.places[site.queries]] for site in sites]
    top = max(max(float(value.max()) for value in at), 1e-9)
    return _map(
        state, "What every head adds at this token: norm behind the out projection", "adds", at, top, "blue", 0.5
    )


def _map(
    state: State, title: str, what: str, rows: Sequence[Tensor | None], top: float, hue: str, power: float = 1.0
) -> str:
    """A grid of one row per site and one column per head; (value / top) ** power is its colour's strength."""
    sites = list(state.after.sites.values())
    heads = max(len(site.added_HT) for site in sites)
    cells = [_corner(heads)]
    for site, values_H in zip(sites, rows, strict=True):
        cells.append(f'<span class="row">{name_of(site).removeprefix("layer ")}</span>')
        for head in range(heads):
            cells.append(_cell(state, site, head, values_H, what, top, power))
    return (
        f'<p class="what">{title}</p><div class="map {hue}" style="--heads:{heads}">{"".join(cells)}</div>'
        f"{_scale(hue, top, power)}"
    )


def _corner(heads: int) -> str:
    step = 1 if heads <= 16 else 4
    return '<span class="row">layer</span>' + "".join(
        f'<span class="head">{head if head % step == 0 else ""}</span>' for head in range(heads)
    )


def _cell(state: State, site: Site, head: int, values_H: Tensor | None, what: str, top: float, power: float) -> str:
    if head >= len(site.added_HT):
        return "<span></span>"
    chosen = (site.name, head) == (state.site, state.head)
    changed = " changed" if (site.name, head) in state.changes else ""
    said = "no gate" if values_H is None else f"{what} {float(values_H[head]):.3f}"
    none, value = (" none", 0.0) if values_H is None else ("", _part(float(values_H[head]), top) ** power)
    return (
        f'<button type="button" tabindex="-1" class="cell{changed}{none}" style="--v:{value:.3f}" data-site="{escape(site.name)}" '
        f'data-head="{head}" aria-pressed="{_yes(chosen)}" title="{name_of(site)}, head {head}: {said}"></button>'
    )


def changes(state: State) -> str:
    """The list of changes, each with a button that undoes it."""
    if not state.changes:
        return '<p class="what">No head is changed.</p>'
    items = "".join(
        f"<li>{name_of(state.after.sites[name])}, head {head}: {_said(change)} "
        f'<button type="button" class="undo" data-site="{escape(name)}" data-head="{head}" '
        f'aria-label="Undo the change of {name_of(state.after.sites[name])}, head {head}">undo</button></li>'
        for (name, head), change in state.changes.items()
    )
    return f'<ul class="changes">{items}</ul>'


def _said(change: Any) -> str:
    return f"gate set to {change.value:.2f}" if change.kind == "set" else f"× {change.value:.2f}"


def predicted(state: State, tokenizer: Any, fills_masks: bool) -> str:
    """The likeliest tokens as the model is and with the changes."""
    before, after = state.before.predicted, state.after.predicted
    if before is None or after is None:
        mask = escape(str(getattr(tokenizer, "mask_token", "")))
        why = f"Write {mask} to see what the model fills in." if fills_masks else "This model predicts no tokens."
        return f'<p class="what">{why}</p>'
    rows, moved = shift(before, after, NEXT)
    top = max(max(row.before, row.after) for row in rows)
    changed = bool(state.changes)
    where = "at the mask" if before.kind == "mask" else "after the last token"
    told = f"Changed by {moved:.4f} nats (KL divergence)." if changed else "Change a head to see it move."
    lines = "".join(
        _candidate(visible(written(tokenizer, row.id)), row.before, row.after, top, changed) for row in rows
    )
    key = '<span class="key was"></span>as it is <span class="key now"></span>with the changes' if changed else ""
    return f'<p class="what">The likeliest tokens {where}. {told} {key}</p><div class="next">{lines}</div>'


def _candidate(token: str, before: float, after: float, top: float, changed: bool) -> str:
    now = f'<i class="now" style="--v:{after / top:.4f}"></i>' if changed else ""
    said = f"{before:.1%} → {after:.1%}" if changed else f"{before:.1%}"
    return f'<b>{token}</b><span class="both"><i class="was" style="--v:{before / top:.4f}"></i>{now}</span><em>{said}</em>'


def visible(token: str) -> str:
    """A token as escaped HTML in which blanks can be seen."""
    if not token:
        return "∅"
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    return escape(shown if shown.strip() else shown.replace(" ", "␣"))


def bare(token: str) -> str:
    """`visible`, for within a sentence: without the blank before a word."""
    return visible(token.strip() or token)


def _part(value: float, top: float) -> float:
    return round(min(max(value / top, 0.0), 1.0), 4)


def _scale(hue: str, top: float, power: float = 1.0) -> str:
    note = "" if power == 1 else ", colours by the square root"
    return f'<p class="scale">0 <span class="ramp {hue}"></span> {top:.3g}{note}</p>'


def _upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def _yes(said: bool) -> str:
    return "true" if said else "false"


def options(state: State) -> list[tuple[str, str]]:
    """(label, name) of every site, for a list to choose from; labels are unique."""
    return list(_unique((name_of(site), site.name) for site in state.after.sites.values()))


def _unique(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    known: set[str] = set()
    for label, name in pairs:
        yield (f"{label} ({name})" if label in known else label), name
        known.add(label)
