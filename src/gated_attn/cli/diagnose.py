"""`gated-attn diagnose`: what a model's attention, residual stream and gates do on a text."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from gated_attn.errors import RecipeError

RECORD, PAGE = "diagnosis.json", "report.html"


def run(
    model: str,
    text: Path | None,
    tokens: int,
    length: int | None,
    layers: str | None,
    heads: str | None,
    queries: str | None,
    sink_tokens: int,
    special: bool,
    dtype: str,
    attention: str | None,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from gated_attn.cli.models import load
    from gated_attn.measure.diagnose import diagnose

    loaded = load(model, dtype=dtype, attn_implementation=attention)
    batches, source, labels = inputs(loaded.model, loaded.tokenizer, text, tokens, length, special=special)
    made = diagnose(
        loaded.model,
        batches,
        name=loaded.label,
        text=source,
        tokenizer=loaded.tokenizer,
        labels=labels,
        layers=_numbers(layers, "--layers"),
        heads=_numbers(heads, "--heads"),
        queries=_range(queries),
        sink_tokens=sink_tokens,
    )
    if output is not None:
        made.save(output / RECORD)
    if as_json:
        print(json.dumps(brief(made), indent=1))
    else:
        print(made)
    if output is None:
        return
    # Last, so that a package which is missing for the page takes nothing else away.
    from gated_attn.report.diagnosis import write_diagnosis_report

    write_diagnosis_report(made, output / PAGE)
    if not as_json:
        print(f"saved: {output / RECORD}, {output / PAGE}")


def inputs(
    model: Any, tokenizer: Any, text: Path | None, tokens: int, length: int | None, *, special: bool = True
) -> tuple[list[Any], str, list[str] | None]:
    """(batches, what they are, names of positions that are no text tokens) for a model of any kind."""
    from gated_attn.hf.inputs import example_inputs
    from gated_attn.measure.images import patch_labels
    from gated_attn.measure.texts import python_help, text_batches

    reads_text = model.main_input_name == "input_ids" and not (
        getattr(model.config, "is_encoder_decoder", False) or hasattr(model.config, "vision_config")
    )
    if tokenizer is None or not reads_text:
        if text is not None:
            why = "has no tokenizer" if reads_text else f"reads {model.main_input_name}"
            raise RecipeError(
                f"--text: this model {why}, so it cannot read {text}; leave --text out for a random input"
            )
        batch = example_inputs(model)
        return [batch], "random input, seed 0", patch_labels(model, batch.get("pixel_values"))
    if text is None:
        content, source = python_help(), "the help texts of Python"
    else:
        try:
            content, source = text.read_text(encoding="utf-8"), text.name
        except UnicodeDecodeError as error:
            raise RecipeError(f"{text} is not UTF-8 text: {error}") from error
    size = _length(model, tokens, length)
    batches: list[Any] = list(text_batches(tokenizer, content, tokens=tokens, length=size, special=special))
    # The vocabulary's scores are not looked at.
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        batches = [{**batch, "logits_to_keep": 1} for batch in batches]
    return batches, source if special else f"{source}, without special tokens", None


def _length(model: Any, tokens: int, length: int | None) -> int:
    """Tokens of a sequence: 512, or as many as are asked for or the model has positions for."""
    most = (
        getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None) or tokens
    )
    if length is None:
        return min(512, tokens, most)
    if length > most:
        raise RecipeError(f"--length {length}: this model has positions for {most} tokens")
    return length


def brief(made: Any) -> dict[str, Any]:
    """The object that `--json` prints: the model's numbers, and one row per attention module."""
    names = ("first_token_share", "sink_rate", "strongest_early_share", "max_abs", "kurtosis", "entropy", "gate_mean")
    return {
        "model": made.model,
        **{name: getattr(made, name) for name in names},
        "layers": made.rows(),
        "tokens": made.tokens,
        "text": made.text,
        "seconds": made.seconds,
        "plain_seconds": made.plain_seconds,
        "peak_extra_bytes": made.peak_extra_bytes,
        "definitions": made.definitions,
    }


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """`0-3,7` -> 0, 1, 2, 3, 7."""
    if text is None:
        return None
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not numbers:
                raise ValueError
            found += numbers
    except ValueError:
        raise RecipeError(f"{option} {text!r}: numbers and ranges such as 0-3,7 are wanted") from None
    return tuple(dict.fromkeys(found))


def _range(text: str | None) -> tuple[int, int] | None:
    """`64-128` -> positions 64 to 127."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise RecipeError(f"--queries {text!r}: two positions such as 64-128 are wanted, the second left out")
    return int(first), int(last)
