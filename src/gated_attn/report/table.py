"""The comparison table: one row per gate, averaged over seeds, and what the paired differences show.

The columns, their definitions and their number formats are here once; the terminal and the HTML report both use them.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from gated_attn.records import GATE_SHUT, CompareRecord, CompareRow, Paired, verdict

WIDTH = 100
"""Columns of text that the table fits in."""

GATE_WIDTH = 16
"""Columns that the gate's name gets before gaps between columns shrink; longer names go on the next line."""

DASH = "-"
"""What stands where there is no number."""

METRIC_NAMES = {"loss": "loss", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class Summary:
    """One gate's row: means over the seeds that finished."""

    gate: str
    seeds: int
    diverged: int
    parameters: float
    parameters_change: float
    """Parameters as trained, as a share above or below the baseline's."""
    added: float
    loss: float | None
    bits_per_byte: float | None
    first_token_share: float | None
    gate_mean: float | None
    gate_below: float | None
    max_abs: float | None
    largest_stable_lr: float | None
    step_time: float | None
    paired: Paired | None
    is_baseline: bool

    @property
    def perplexity(self) -> float | None:
        """The exp of the mean loss, which is the geometric mean of the seeds' perplexities."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class Column:
    """A column: `short` heads it in the terminal (its lines split at newlines), `title` in the HTML report."""

    key: str
    short: str
    title: str
    definition: str
    cell: Callable[[Summary], str]


def summarize(compare: CompareRecord) -> tuple[Summary, ...]:
    """One `Summary` per gate of `compare`, the baseline first, the others in the order of their first row."""
    gates = sorted(dict.fromkeys(row.gate for row in compare.rows), key=lambda gate: gate != compare.baseline)
    base = _mean(row.parameters for row in compare.rows if row.gate == compare.baseline)
    paired = headline_pairs(compare)
    return tuple(
        _summary(gate, [row for row in compare.rows if row.gate == gate], base, paired.get(gate), compare)
        for gate in gates
    )


def headline_pairs(compare: CompareRecord) -> dict[str, Paired]:
    """The paired difference shown for each gate: in bits per byte where there is one, otherwise in loss."""
    pairs: dict[str, Paired] = {}
    for metric in ("loss", "bits_per_byte"):
        pairs.update({pair.gate: pair for pair in compare.paired if pair.metric == metric})
    return pairs


def columns(compare: CompareRecord) -> tuple[Column, ...]:
    """The columns that `compare` has numbers for."""
    summaries = summarize(compare)
    metrics = {summary.paired.metric for summary in summaries if summary.paired}
    metric = METRIC_NAMES["bits_per_byte" if "bits_per_byte" in metrics else "loss"]
    quality = _BITS if any(summary.bits_per_byte is not None for summary in summaries) else _PERPLEXITY
    swept = any(summary.largest_stable_lr is not None for summary in summaries)
    alone = [summary.gate for summary in summaries] == [compare.baseline]
    compared = [] if alone else [_difference(metric, any(s.paired.n > 1 for s in summaries if s.paired))]
    return (*_SIZE, _LOSS, quality, *compared, *_BEHAVIOUR, *([_STABLE] if swept else []))


def verdict_lines(compare: CompareRecord) -> list[str]:
    """One sentence per paired difference: better, worse, or no difference shown; in bits per byte or loss, not in both."""
    headline = headline_pairs(compare).values()
    lines = [
        f"{pair.gate}: {verdict(pair)} ({METRIC_NAMES.get(pair.metric, pair.metric)}"
        f"{f', {pair.n} paired seeds' if pair.n > 1 else ''})"
        for pair in compare.paired
        if pair.metric not in METRIC_NAMES or pair in headline
    ]
    for summary in summarize(compare):
        if summary.diverged:
            lines.append(
                f"{summary.gate}: {summary.diverged} of {summary.seeds} runs diverged; the means leave them out"
            )
    return lines


def render_text(compare: CompareRecord, width: int = WIDTH) -> str:
    """The table and its verdicts as plain text of at most `width` columns: no colour, no control characters."""
    heads = columns(compare)
    grid = [[column.short.split("\n") for column in heads]]
    grid += [[column.cell(summary).split("\n") for column in heads] for summary in summarize(compare)]
    widths = [max(len(line) for row in grid for line in row[i]) for i in range(len(heads))]
    gap = 2 if sum(widths[1:]) + 2 * len(widths) + GATE_WIDTH <= width else 1
    widths[0] = min(widths[0], max(width - sum(widths[1:]) - gap * (len(heads) - 1), 8))
    for row in grid:
        row[0] = [piece for line in row[0] for piece in _fold(line, widths[0])]
    lines = [f"{compare.recipe}: {_seeds_text(compare)}", ""]
    for number, row in enumerate(grid):
        for level in range(max(map(len, row))):
            cells = [cell[level] if level < len(cell) else "" for cell in row]
            padded = [cells[0].ljust(widths[0])] + [
                cell.rjust(size) for cell, size in zip(cells[1:], widths[1:], strict=True)
            ]
            lines.append((" " * gap).join(padded).rstrip())
        if number == 0:
            lines.append("-" * (sum(widths) + gap * (len(heads) - 1)))
    lines.append("")
    for sentence in verdict_lines(compare):
        lines += textwrap.wrap(sentence, width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines).rstrip() + "\n"


def print_table(compare: CompareRecord, file: TextIO | None = None) -> None:
    """Print the table: in colour on a terminal if rich is installed, as `render_text` elsewhere."""
    stream = file or sys.stdout
    if not stream.isatty() or "NO_COLOR" in os.environ:
        stream.write(render_text(compare))
        return
    try:
        _print_rich(compare, stream)
    except ModuleNotFoundError:
        stream.write(render_text(compare))


def _print_rich(compare: CompareRecord, stream: TextIO) -> None:
    """`render_text` with its heading in bold and its verdicts in the colour of what they show."""
    from rich.console import Console
    from rich.text import Text

    text = Text(render_text(compare))
    text.highlight_regex(r"^[^\n]+", "bold")
    text.highlight_regex(r"better by [^\]]+\]", "bold blue")
    text.highlight_regex(r"worse by [^\]]+\]", "bold red")
    text.highlight_regex(r"no difference shown: [^\]]+\]\s+includes 0", "bold")
    Console(file=stream).print(text, soft_wrap=True, end="")


def _summary(
    gate: str, rows: Sequence[CompareRow], base: float | None, paired: Paired | None, compare: CompareRecord
) -> Summary:
    finished = [row for row in rows if not row.diverged]
    parameters = _mean(row.parameters for row in rows) or 0.0
    lrs = [row.largest_stable_lr for row in rows if row.largest_stable_lr is not None]
    return Summary(
        gate=gate,
        seeds=len(rows),
        diverged=len(rows) - len(finished),
        parameters=parameters,
        parameters_change=parameters / base - 1 if base else 0.0,
        added=_mean(row.added_parameters for row in rows) or 0.0,
        loss=_mean(row.loss for row in finished),
        bits_per_byte=_mean(row.bits_per_byte for row in finished),
        first_token_share=_mean(row.first_token_share for row in finished),
        gate_mean=_mean(row.gate_mean for row in finished),
        gate_below=_mean(row.gate_below for row in finished),
        max_abs=_mean(row.max_abs for row in finished),
        largest_stable_lr=min(lrs, default=None),
        step_time=compare.timing.get(gate),
        paired=paired,
        is_baseline=gate == compare.baseline,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _seeds_text(compare: CompareRecord) -> str:
    seeds = len({row.seed for row in compare.rows})
    return f"mean over {seeds} seeds" if seeds > 1 else "one seed"


def number(value: float | None, spec: str) -> str:
    """`value` in the format `spec`, or a dash where there is none."""
    return DASH if value is None else format(value, spec)


def _parameters_cell(summary: Summary) -> str:
    count = f"{summary.parameters:,.0f}"
    return count if summary.is_baseline else f"{count}\n{summary.parameters_change:+.2%}\ngate {summary.added:.2%}"


def _loss_cell(summary: Summary) -> str:
    return "diverged" if summary.diverged == summary.seeds else number(summary.loss, ".4f")


def _difference_cell(summary: Summary) -> str:
    pair = summary.paired
    if pair is None or pair.difference is None:
        return "baseline" if summary.is_baseline else DASH
    if pair.low is None or pair.high is None:
        return f"{pair.difference:+.4f}\n(one seed)"
    return f"{pair.difference:+.4f}\n[{pair.low:+.4f}, {pair.high:+.4f}]"


def _difference(metric: str, several: bool) -> Column:
    if not several:
        return Column(
            "difference",
            "difference",
            f"Difference in {metric}",
            f"The gate's {metric} minus the baseline's on the same seed, data order and initialisation; negative is better. One "
            "seed has no interval: how much of the difference is chance, it does not say.",
            _difference_cell,
        )
    return Column(
        "difference",
        "difference\n95 % interval",
        f"Difference in {metric}, 95 % interval",
        f"Mean over seeds of the gate's {metric} minus the baseline's on the same seed, data order and initialisation; "
        "negative is better. The interval is Student's t over the seeds. Where it includes 0, no difference is shown.",
        _difference_cell,
    )


_SIZE = (
    Column(
        "gate",
        "gate",
        "Gate",
        "The gate's specification: position, width, activation and options; none is plain attention.",
        lambda s: s.gate,
    ),
    Column(
        "parameters",
        "params",
        "Parameters",
        "Trained parameters of the whole model; below, how many more or fewer than the baseline has; then, after "
        "'gate', the gate's share of the ungated model before other layers were narrowed to match the sizes.",
        _parameters_cell,
    ),
)
_LOSS = Column(
    "loss",
    "loss",
    "Validation loss",
    "Mean negative log-likelihood of the validation text, in nats per token.",
    _loss_cell,
)
_BITS = Column(
    "bits_per_byte",
    "bits/\nbyte",
    "Bits per byte",
    "Total negative log-likelihood of the validation text / (ln 2 x its UTF-8 bytes); free of the tokenizer.",
    lambda s: number(s.bits_per_byte, ".4f"),
)
_PERPLEXITY = Column(
    "perplexity",
    "ppl",
    "Perplexity",
    "exp(validation loss), per token; comparable only between models with the same tokenizer.",
    lambda s: number(s.perplexity, ".3f"),
)
_BEHAVIOUR = (
    Column(
        "step_time",
        "step\ntime",
        "Step time",
        "Seconds per training step relative to the baseline, on this machine.",
        lambda s: DASH if s.step_time is None else f"{s.step_time:.2f}x",
    ),
    Column(
        "gate_mean",
        "gate\nmean",
        "Gate mean",
        "Mean gate value over validation tokens, layers, heads (and channels).",
        lambda s: number(s.gate_mean, ".3f"),
    ),
    Column(
        "gate_below",
        f"gate\n<{GATE_SHUT}",
        f"Gate below {GATE_SHUT}",
        f"Share of gate values below {GATE_SHUT}: how often the gate is shut.",
        lambda s: number(s.gate_below, ".0%"),
    ),
    Column(
        "first_token_share",
        "first\ntoken",
        "First-token share",
        "Share of attention that falls on the first token, a mean over layers, heads and all queries but the first; "
        "a large share is an attention sink.",
        lambda s: number(s.first_token_share, ".1%"),
    ),
    Column(
        "max_abs",
        "max\n|x|",
        "Largest activation",
        "Largest absolute value in the residual stream, over validation tokens and layers.",
        lambda s: number(s.max_abs, ",.1f"),
    ),
)
_STABLE = Column(
    "largest_stable_lr",
    "stable\nlr",
    "Largest stable learning rate",
    "Largest learning rate of the sweep, one run of a quarter of the steps each, below the first that diverged.",
    lambda s: number(s.largest_stable_lr, ".2g"),
)


def _fold(text: str, size: int) -> list[str]:
    """`text` cut into pieces of at most `size` characters, after a colon or comma where possible."""
    pieces = []
    while len(text) > size:
        cut = max(text.rfind(mark, 0, size) for mark in ":,") + 1
        cut = cut if cut > 0 else size
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]
