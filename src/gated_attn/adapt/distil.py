"""Distilling a gated model towards what it was: only its gates train, and the teacher is the same model without them.

Gates that are read from the scores stay as they are: they are exact, and trained they would let the first token be a sink again.

    loss = mean over tokens of KL(teacher || student) = sum_v p_v (log p_v - log q_v), nats

The teacher reads the sink token in front, the student does not; both have the same weights, so one model is in memory.

Shapes: B batch, T tokens, N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from gated_attn.adapt.shares import fast, in_front
from gated_attn.errors import RecipeError, TrainingError
from gated_attn.hf.attach import attached
from gated_attn.hf.store import TENSORS, load_gates, save_gates, unwrapped
from gated_attn.hf.swap import stock
from gated_attn.train.trainer import WholeTrainer, newest_checkpoint

LOG_EVERY, SAVE_EVERY = 10, 20
"""Steps whose divergence is averaged, and between two checkpoints: a multiple, so that a mean is never cut."""

WARM_UP = 10
"""Steps over which the learning rate rises from 0."""


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of token numbers (N, T), in an order drawn from the seed, again and again until `count` are given."""

    def __init__(self, ids_NT: Tensor, count: int, seed: int) -> None:
        self.ids_NT, self.count = ids_NT, count
        order = torch.Generator().manual_seed(seed)
        rounds = [torch.randperm(len(ids_NT), generator=order) for _ in range(math.ceil(count / len(ids_NT)))]
        self.order = torch.cat(rounds).tolist()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids_NT[self.order[index]]}


class Distiller(WholeTrainer):
    """Trainer of the gates of a model, and of nothing else; its checkpoints hold the gates alone."""

    weights = TENSORS

    def __init__(
        self, model: nn.Module, rows: Rows, sink: int | None, args: TrainingArguments, *, teacher: bool = True
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=rows)
        self.sink, self.teacher = sink, teacher

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.Adam(trained, lr=self.args.learning_rate, betas=(0.9, 0.95))
        return self.optimizer

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Both sides in evaluation mode: dropout would be told apart from nothing."""
        ids_BT, one = inputs["input_ids"], unwrapped(model)
        model.eval()
        if not self.teacher:
            with fast(ids_BT.device.type):
                logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())
        with fast(ids_BT.device.type):
            with torch.no_grad(), stock(one):
                want_BTV = one(**in_front(ids_BT, self.sink), use_cache=False).logits
            got_BTV = model(input_ids=ids_BT, use_cache=False).logits
        return divergence(want_BTV[:, want_BTV.shape[1] - got_BTV.shape[1] :], got_BTV)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not math.isfinite(float(loss)):
            raise TrainingError(
                self.state.global_step + 1, f"the divergence is {float(loss)}; lower lr={self.args.learning_rate:g}"
            )
        return loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        save_gates(self.model, output_dir or str(self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_gates(self.model, resume_from_checkpoint)


class _Told(TrainerCallback):
    """Tells how far a run is."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress(state.global_step)


def divergence(want_BTV: Tensor, got_BTV: Tensor) -> Tensor:
    """Mean over tokens of KL(softmax(want) || softmax(got)) in nats, in float32."""
    total = got_BTV.new_zeros((), dtype=torch.float32)
    for want_TV, got_TV in zip(want_BTV, got_BTV, strict=True):  # a row at a time: V is large
        want_TV = want_TV.float().log_softmax(-1)
        total = total + (want_TV.exp() * (want_TV - got_TV.float().log_softmax(-1))).sum()
    return total / (got_BTV.shape[0] * got_BTV.shape[1])


def distil(
    model: nn.Module,
    ids_NT: Tensor,
    folder: Path,
    *,
    sink: int | None,
    steps: int,
    lr: float,
    batch: int = 4,
    seed: int = 0,
    teacher: bool = True,
    progress: Callable[[int], None] = lambda step: None,
) -> list[tuple[int, float]]:
    """Train the gates that read hidden states for some steps; returns (step, divergence), means over the steps between two of them.

    Goes on from the newest checkpoint in the folder, as a run that was never interrupted would have; the schedule is a cosine to
    0 after a warm-up. Every other parameter keeps its bits, and its `requires_grad`.

    Args:
        ids_NT: rows of text, without the sink token.
        sink: the token in front of what the teacher reads; None: both read the same.
        teacher: False trains on the text itself, by next-token loss, as fine-tuning does.

    Raises RecipeError for fewer rows than a batch, TrainingError for a divergence that is not finite.
    """
    if len(ids_NT) < batch:
        raise RecipeError(f"{len(ids_NT)} rows of text do not fill a batch of {batch}; pass more text")
    trained = [gate for gate in attached(model).values() if gate.spec.source != "lse"]
    wanted = {id(parameter) for gate in trained for parameter in gate.parameters()}
    asked = {parameter: parameter.requires_grad for parameter in model.parameters()}
    modes = {module: module.training for module in model.modules()}
    for parameter in asked:
        parameter.requires_grad_(id(parameter) in wanted)
    try:
        rows, args = Rows(ids_NT, steps * batch, seed), _arguments(folder, steps, lr, batch, seed)
        trainer = Distiller(model, rows, sink, args, teacher=teacher)
        trainer.add_callback(_Told(progress))
        trainer.train(resume_from_checkpoint=newest_checkpoint(folder, TENSORS))
    finally:
        for parameter, before in asked.items():
            parameter.requires_grad_(before)
            parameter.grad = None
        for module, training in modes.items():
            module.training = training
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def _arguments(folder: Path, steps: int, lr: float, batch: int, seed: int) -> TrainingArguments:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(WARM_UP, steps // 4),
        max_grad_norm=0.0,
        logging_steps=min(LOG_EVERY, steps),
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        seed=seed,
        data_seed=seed,
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    if args.n_gpu > 1:
        args._n_gpu = 1  # one process, one GPU; torchrun shares the work
    return args
