"""Seconds of a model's forward watched by `capture` against the plain forward, in turns, and the memory that watching takes.

SmolLM2 on pieces of Python's help texts, one thread; the vocabulary's scores are left out of both.
"""

from __future__ import annotations

import statistics
import time

import results
import torch

from gated_attn.hf.pretrained import load_sample, tokenizer
from gated_attn.measure.capture import capture
from gated_attn.measure.memory import PeakMemory
from gated_attn.measure.texts import python_help, text_batches

PAIRS = {512: 15, 1024: 15, 8192: 1}
"""Tokens of the sequence -> how often each side runs; the longest takes minutes a pair."""


def main() -> None:
    torch.set_num_threads(1)
    model, words = load_sample("smollm2"), tokenizer("smollm2")
    for length, pairs in PAIRS.items():
        (batch,) = text_batches(words, python_help(), tokens=length, length=length)
        ratios, watched, plain = [], [], []
        peak, peak_plain = PeakMemory(), PeakMemory()
        with torch.no_grad():
            for _ in range(pairs):
                start = time.perf_counter()
                with peak_plain:
                    model(**batch, logits_to_keep=1)
                middle = time.perf_counter()
                with capture(model), peak:
                    model(**batch, logits_to_keep=1)
                end = time.perf_counter()
                plain.append(middle - start)
                watched.append(end - middle)
                ratios.append(watched[-1] / plain[-1])
        extra = (peak.bytes - peak_plain.bytes) / 2**20
        case = f"smollm2, {length} tokens, {max(extra, 0):.0f} MiB more"
        results.append(
            "diagnose",
            case,
            statistics.median(watched),
            statistics.median(plain),
            "s",
            statistics.median(ratios),
            pairs,
        )


if __name__ == "__main__":
    main()
