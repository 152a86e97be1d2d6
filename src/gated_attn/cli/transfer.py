"""`gated-attn transfer`: a pretrained model's attention sinks become gates, measured before and after."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gated_attn.errors import RecipeError

PAGE, MAPS = "report.html", "maps.html"
MEASURES = ("perplexity", "attention", "quantisation", "streaming")


def run(
    model: str,
    output: Path,
    tier: str,
    sink: str,
    texts: list[Path],
    tokens: int,
    length: int,
    distil: int,
    lr: float,
    seed: int,
    measure: str,
    dtype: str,
    *,
    as_json: bool,
) -> None:
    from gated_attn.adapt.corpus import corpus, standard_texts
    from gated_attn.adapt.transfer import Plan, find_sink, transfer
    from gated_attn.cli.models import load
    from gated_attn.measure.texts import written

    parts = _parts(measure)
    loaded = load(model, dtype=dtype)
    if loaded.tokenizer is None:
        raise RecipeError(f"{model} has no tokenizer, and text is what a transfer reads")
    if texts:
        told, documents = {one.stem: one.name for one in texts}, {one.stem: [_text(one)] for one in texts}
        if len(documents) < len(texts):
            raise RecipeError("--text: each file is a kind of text by its name, and two have the same name")
    else:
        known = list(standard_texts(loaded.tokenizer))
        told, documents = {kind: what for kind, what, _ in known}, {kind: text for kind, _, text in known}
    token = _sink(sink, loaded.tokenizer, find_sink)
    plan = Plan(tier=tier, sink=token, tokens=tokens, length=length, steps=distil, lr=lr, seed=seed, parts=parts)
    with _progress(quiet=as_json) as progress:
        made = transfer(
            loaded.model, corpus(loaded.tokenizer, documents, length), plan, output, name=loaded.label,
            sink_text=written(loaded.tokenizer, token), texts=told, progress=progress,
        )  # fmt: skip
    if as_json:
        print(json.dumps(brief(made), indent=1))
    else:
        print(made)
        if not made.gated:
            print("this model has no sinks, so it was left as it is")
    # Last, so that a package which is missing for the page takes nothing else away.
    write_pages(output)
    if not as_json:
        print(
            f"saved: {output}; in Python: load_gates(model, {str(output)!r}). Read text without {made.sink_text!r} in front"
        )


def write_pages(folder: Path) -> Path:
    """report.html of the transfer in a folder, and maps.html of its diagnoses, if it has both."""
    from gated_attn.records import Diagnosis, TransferRecord
    from gated_attn.report.diagnosis import write_diagnosis_report
    from gated_attn.report.transfer import write_transfer_report

    maps = None
    if all((folder / f"{which}.json").exists() for which in ("before", "after")):
        before, after = (Diagnosis.load(folder / f"{which}.json") for which in ("before", "after"))
        maps = write_diagnosis_report(after, folder / MAPS, before).name
    return write_transfer_report(TransferRecord.load(folder / "transfer.json"), folder / PAGE, maps)


def brief(made: Any) -> dict[str, Any]:
    """The object that `--json` prints."""
    from gated_attn.records.transfer import NUMBERS

    sides = {
        which: {"perplexity": one.perplexity, **{name: getattr(one, name) for name in NUMBERS}}
        for which, one in (("before", made.before), ("after", made.after))
    }
    names = (
        "model",
        "tier",
        "sink",
        "sinks",
        "seconds",
        "tokens",
        "steps",
        "added_parameters",
        "parameters",
        "definitions",
    )
    return {**sides, **{name: getattr(made, name) for name in names}}


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := [part for part in parts if part not in MEASURES]:
        raise RecipeError(f"--measure: unknown {', '.join(unknown)}; legal: {', '.join(MEASURES)}")
    return parts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text: {error}") from error


def _sink(text: str, tokenizer: Any, find: Any) -> int:
    if text == "auto":
        return int(find(tokenizer))
    if text.isdecimal():
        if int(text) >= len(tokenizer):
            raise RecipeError(f"--sink {text}: the tokenizer has {len(tokenizer)} tokens")
        return int(text)
    known = tokenizer.convert_tokens_to_ids(text)
    if known is None or (known == tokenizer.unk_token_id and text != tokenizer.unk_token):
        raise RecipeError(
            f"--sink {text!r}: no token of the tokenizer; a number, a token such as {tokenizer.bos_token!r}, or auto"
        )
    return int(known)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    """A bar on a terminal, a line per stage elsewhere, on stderr."""
    if quiet or not sys.stderr.isatty():
        last: list[str] = []

        def line(what: str, done: int, total: int) -> None:
            if what not in last and not quiet:
                print(what, file=sys.stderr, flush=True)
            last.append(what)

        yield line
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            stage = what.partition(":")[0]
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total, description=what)

        yield show
