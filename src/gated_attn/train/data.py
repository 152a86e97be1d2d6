"""Training data whose every item is a function of (seed, index), so that all variants of a seed see the same batches.

Shapes: N items, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gated_attn import samples
from gated_attn.errors import RecipeError
from gated_attn.measure.decoder import gates_of
from gated_attn.models.decoder import IGNORED, Decoder
from gated_attn.train.recipe import TRIGGER_SHARE, Recipe

Item = dict[str, Tensor]


class TextCrops(Dataset[Item]):
    """Random crops of a text's bytes: item i starts at an offset drawn from the seed."""

    def __init__(self, tokens_N: Tensor, context: int, items: int, seed: int) -> None:
        if len(tokens_N) <= context:
            raise RecipeError(f"the text has {len(tokens_N)} bytes and the context is {context}; use a shorter context")
        self.tokens_N, self.context = tokens_N, context
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(tokens_N) - context + 1, (items,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Item:
        start = self.starts[index]
        return as_item(self.tokens_N[start : start + self.context].long())


class Backcopy(Dataset[Item]):
    """Bigram-backcopy (arXiv:2410.13835): a Markov chain in which a trigger is followed by the token before it.

    Token 0 opens every sequence; tokens 1 to `triggers` are the triggers; the others follow a fixed random bigram table,
    the same for every seed. So only at a trigger does attention have something to fetch.
    """

    BLOCK = 256
    """Items are generated this many at a time, each block from its own seed."""

    def __init__(self, vocab_size: int, triggers: int, context: int, items: int, seed: int) -> None:
        self.vocab_size, self.triggers, self.context, self.items, self.seed = vocab_size, triggers, context, items, seed
        self.table = bigrams(vocab_size, triggers)
        self._blocks: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Item:
        block, row = divmod(index, self.BLOCK)
        if block not in self._blocks:
            self._blocks = {block: self._generate(block)}
        return as_item(self._blocks[block][row])

    def _generate(self, block: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + block)
        tokens_NT = torch.zeros(self.BLOCK, self.context, dtype=torch.long)
        free = self.vocab_size - 1 - self.triggers
        tokens_NT[:, 1] = 1 + self.triggers + torch.randint(free, (self.BLOCK,), generator=generator)
        for t in range(2, self.context):
            last = tokens_NT[:, t - 1]
            drawn = torch.multinomial(self.table[last], 1, generator=generator)[:, 0]
            is_trigger = (last >= 1) & (last <= self.triggers)
            tokens_NT[:, t] = torch.where(is_trigger, tokens_NT[:, t - 2], drawn)
        return tokens_NT


def bigrams(vocab_size: int, triggers: int) -> Tensor:
    """P(next | token), (V, V): a few likely successors per token, every trigger at `TRIGGER_SHARE`, never the opening token."""
    generator = torch.Generator().manual_seed(20_241_013)
    scores = torch.randn(vocab_size, vocab_size, generator=generator) * 2
    scores[:, : 1 + triggers] = -torch.inf
    table = scores.softmax(-1) * (1 - TRIGGER_SHARE * triggers)
    table[:, 1 : 1 + triggers] = TRIGGER_SHARE
    return table


def as_item(tokens_T: Tensor) -> Item:
    """Inputs and labels of one sequence; nothing predicts its first token, so that label does not count."""
    labels_T = tokens_T.clone()
    labels_T[0] = IGNORED
    return {"input_ids": tokens_T, "labels": labels_T}


def datasets(recipe: Recipe, seed: int) -> tuple[Dataset[Item], list[Tensor]]:
    """(training items in their order, validation batches of input_ids). Validation is the same for every seed."""
    table, data, model = recipe.training, recipe.data, recipe.model
    items, held_out = table.steps * table.batch, table.eval_batches * table.batch
    if data.task == "backcopy":
        train: Dataset[Item] = Backcopy(data.vocab_size, data.triggers, model.context, items, seed)
        test = Backcopy(data.vocab_size, data.triggers, model.context, held_out, 2**31 - 1)
        rows = torch.stack([test[i]["input_ids"] for i in range(held_out)])
    else:
        tokens_N = torch.frombuffer(bytearray(samples.text(data.sample).encode()), dtype=torch.uint8)
        split = int(len(tokens_N) * (1 - data.validation))
        train = TextCrops(tokens_N[:split], model.context, items, seed)
        rows = spread_windows(tokens_N[split:].long(), model.context, held_out)
    return train, list(rows.split(table.batch))


def spread_windows(tokens_N: Tensor, context: int, count: int) -> Tensor:
    """Up to `count` windows of `context` tokens that do not overlap, spread evenly over the text, (count, T)."""
    whole = len(tokens_N) // context
    if whole == 0:
        raise RecipeError(f"{len(tokens_N)} validation bytes hold no window of {context}; use a shorter context")
    picked = torch.linspace(0, whole - 1, min(count, whole)).long()
    return torch.stack([tokens_N[i * context : (i + 1) * context] for i in picked.tolist()])


def vocab_size(recipe: Recipe) -> int:
    """256 bytes for text, the recipe's own for generated tasks."""
    return recipe.data.vocab_size if recipe.data.task == "backcopy" else 256


def token_texts(recipe: Recipe, tokens_T: Tensor) -> list[str]:
    """How the report writes tokens: characters of a text, numbered words of a generated task."""
    if recipe.data.task == "text":
        return [bytes([token]).decode("latin-1") for token in tokens_T.tolist()]
    triggers = recipe.data.triggers
    return ["<s>" if t == 0 else f"T{t}" if t <= triggers else f"w{t}" for t in tokens_T.tolist()]


def task_measures(recipe: Recipe, model: Decoder, batches: list[Tensor]) -> dict[str, float]:
    """What only this task can measure: for backcopy, the mean gate on triggers and elsewhere, the first token left out."""
    if recipe.data.task != "backcopy":
        return {}
    totals = {"gate_on_triggers": [0.0, 0], "gate_elsewhere": [0.0, 0]}
    for tokens_BT in batches:
        on_BT = (tokens_BT >= 1) & (tokens_BT <= recipe.data.triggers)
        counted_BT = torch.ones_like(on_BT)
        counted_BT[:, 0] = False
        for gate_BTHG in gates_of(model, tokens_BT).values():
            mean_BT = gate_BTHG.float().mean((2, 3))
            for name, where in (("gate_on_triggers", on_BT & counted_BT), ("gate_elsewhere", ~on_BT & counted_BT)):
                totals[name][0] += float(mean_BT[where].sum())
                totals[name][1] += int(where.sum())
    return {name: total / count for name, (total, count) in totals.items() if count}
