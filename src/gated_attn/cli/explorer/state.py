"""What a visitor of the explorer's page has typed, chosen and changed, and what the model did with it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from gated_attn.errors import RecipeError, UnsupportedError
from gated_attn.hf.store import unwrapped
from gated_attn.measure.capture import AGAIN, attention_modules
from gated_attn.measure.edits import gated_to, scaled, why_not_set
from gated_attn.measure.explore import Site, View, look, read

Head = tuple[str, int]
"""(name of a site, number of a head)."""


@dataclass(frozen=True)
class Change:
    """A head's output times `value` (`scale`), or its gate replaced by `value` (`set`)."""

    kind: str
    value: float

    @property
    def idle(self) -> bool:
        """Whether it changes nothing."""
        return self.kind == "scale" and self.value == 1


@dataclass(frozen=True)
class State:
    """One visitor's page.

    Fields:
        text, target: what was read.
        before, after: the model as it is, and with the changes; the same view where there are none.
        changes: what is changed, in the order in which it was.
        site, head: the one that is looked at.
        places: side -> number of the token that is looked at.
    """

    text: str
    target: str
    before: View = field(repr=False)
    after: View = field(repr=False)
    changes: dict[Head, Change]
    site: str
    head: int
    places: dict[str, int]

    @property
    def seen(self) -> Site:
        """What the chosen site does, with the changes."""
        return self.after.sites[self.site]

    @property
    def place(self) -> int:
        """The chosen token among those that the chosen site's queries are of."""
        return self.places[self.seen.queries]

    @property
    def change(self) -> Change:
        """That of the chosen head."""
        return self.changes.get((self.site, self.head), Change("scale", 1.0))


class Explorer:
    """A model and its tokenizer, which all visitors share, one at a time."""

    def __init__(self, model: Any, tokenizer: Any, label: str) -> None:
        if tokenizer is None:
            raise RecipeError(f"{label} has no tokenizer, and the explorer reads text")
        if getattr(model, "main_input_name", "input_ids") != "input_ids":
            raise UnsupportedError(f"{label} reads {model.main_input_name}, and the explorer reads text")
        self.model, self.tokenizer, self.label = model, tokenizer, label
        self.rows = attention_modules(unwrapped(model))
        self.lock = threading.Lock()

    @property
    def two_sides(self) -> bool:
        """Whether a decoder reads a text of its own."""
        return bool(getattr(unwrapped(self.model).config, "is_encoder_decoder", False))

    @property
    def fills_masks(self) -> bool:
        """Whether it is a masked language model."""
        return "MaskedLM" in type(unwrapped(self.model)).__name__ and bool(self.tokenizer.mask_token)

    def example(self) -> str:
        """A text to begin with, with a mask for models that fill masks."""
        if self.fills_masks:
            return f"Paris is the {self.tokenizer.mask_token} of France, and Rome is that of Italy."
        return "Paris is the capital of France, Rome is the capital of Italy, and Berlin is the capital of"

    def why_not_set(self, site: str) -> str:
        """Why the gate of a site cannot be set to a value; empty where it can."""
        return why_not_set(self.rows[site.partition(AGAIN)[0]].module)

    def begin(self, text: str, target: str = "", state: State | None = None) -> State:
        """Read a text. What was chosen and changed before stays; the token looked at is the last one, or the mask."""
        before = self._look(text, target, {})
        changes = {} if state is None else state.changes
        site, head = (next(iter(before.sites)), 0) if state is None else (state.site, state.head)
        places = {side: len(tokens) - 1 for side, tokens in before.tokens.items()}
        if before.predicted is not None and before.predicted.kind == "mask":
            places["text"] = before.predicted.token
        made = State(text, target, before, before, changes, site, head, places)
        return self._changed(made, changes) if changes else made

    def change(self, state: State, head: Head, change: Change | None) -> State:
        """Change a head, or, with None, leave it as the model has it."""
        changes = {key: value for key, value in state.changes.items() if key != head}
        if change is not None and not change.idle:
            changes[head] = change
        return state if changes == state.changes else self._changed(state, changes)

    def reset(self, state: State) -> State:
        """Without changes."""
        return self._changed(state, {})

    def _changed(self, state: State, changes: dict[Head, Change]) -> State:
        after = self._look(state.text, state.target, changes) if changes else state.before
        return replace(state, changes=changes, after=after)

    def _look(self, text: str, target: str, changes: dict[Head, Change]) -> View:
        inputs = read(self.model, self.tokenizer, text, target)
        with self.lock, contextlib.ExitStack() as undo:
            for kind, context in (("scale", scaled), ("set", gated_to)):
                own = {head: change.value for head, change in changes.items() if change.kind == kind}
                if own:
                    undo.enter_context(context(self.model, own))
            return look(self.model, inputs, self.tokenizer)


def choose(state: State, *, site: str | None = None, head: int | None = None, place: int | None = None) -> State:
    """Look at another site, head or token; a head that the site does not have becomes its last."""
    site = state.site if site is None else site
    seen = state.after.sites[site]
    head = min(state.head if head is None else head, len(seen.added_HT) - 1)
    places = dict(state.places)
    if place is not None:
        places[seen.queries] = min(max(place, 0), len(state.after.tokens[seen.queries]) - 1)
    return replace(state, site=site, head=head, places=places)
