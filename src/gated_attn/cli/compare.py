"""`gated-attn compare`: train the same model with several gates and print what the gate changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gated_attn.errors import RecipeError
from gated_attn.records import RunRecord
from gated_attn.report.html import write_report
from gated_attn.report.table import print_table
from gated_attn.train.recipe import Recipe


def run(
    recipe: str,
    gates: str,
    seeds: int,
    match: str,
    lr_sweep: str,
    jobs: int,
    output: Path | None,
    overrides: list[str],
    *,
    as_json: bool,
) -> None:
    from gated_attn.train.compare import compare

    loaded = Recipe.load(recipe, overrides)
    if len(split_gates(gates)) < 2 and not lr_sweep:
        raise RecipeError(
            f"--gates {gates!r}: name the baseline and at least one gate to compare with it, such as none,paper"
        )
    folder = output or Path("runs") / loaded.name
    record = compare(
        loaded, split_gates(gates), seeds, folder, match=match, lr_sweep=_numbers(lr_sweep), jobs=jobs, quiet=as_json
    )
    runs = [RunRecord.load(folder / path) for path in record.runs]
    write_report(record, runs, folder / "report.html")
    if as_json:
        print(json.dumps(record.to_json_object(), indent=1))
        return
    print()
    print_table(record)
    print(f"\nreport: {folder / 'report.html'}")


def split_gates(text: str) -> list[str]:
    """Gates from a comma-separated list; with ';' anywhere it separates instead, and commas belong to the specs."""
    gates = [gate.strip() for gate in text.split(";" if ";" in text else ",") if gate.strip()]
    for gate in gates:
        if re.match(r"\w+=", gate):
            raise RecipeError(
                f"--gates {text!r}: {gate!r} belongs to a spec; separate gates by ';' where a spec has commas"
            )
    return gates


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise RecipeError(f"--lr-sweep {text!r}: pass numbers separated by commas, such as 1,2,4,8") from None
