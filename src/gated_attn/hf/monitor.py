"""`GateMonitor`, a callback of `transformers.Trainer` that measures gates while they train and warns of trouble.

Shapes: B batch, T tokens, H heads (1 for shared and dense gates), G gate width (1 or E).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from gated_attn.attention.activations import activate
from gated_attn.errors import RecipeError, SpecError, UnsupportedError
from gated_attn.hf.callbacks import frozen_until
from gated_attn.hf.watched import Watched, WatchedModule, watch
from gated_attn.records import GateHealth, HealthPoint, HealthRecord, HealthWarning
from gated_attn.spec import DEFAULT_STD

logger = logging.getLogger(__name__)

TOPS = {"sigmoid": 1.0, "2sigmoid": 2.0, "nssigmoid": 1.0, "hardsigmoid": 1.0, "tanh": 1.0}
"""Largest value of the activations that have one; only such a gate can be saturated open."""

MASKS = ("attention_mask", "decoder_attention_mask")
ON_MEMORY = {"EncDecAttention", "encoder_attn", "crossattention"}
"""Names of the attention modules whose value and key gates read the encoder's tokens."""


@dataclass
class _Seen:
    """One gate in one measured step: sums over tokens and channels, per head: n, g, shut, open, (g - start)^2."""

    sums_H5: Tensor
    grad: float | None = None
    dead: list[int] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        return bool(self.sums_H5[:, 0].any())


class GateMonitor(TrainerCallback):
    """Log every gate's health at the first step and at every `every`-th, and warn once per gate and kind of trouble.

    Gates that were attached and gates that the model was born with (Qwen3.5, LFM3, ...) are watched alike. Of a projection that
    holds more than the gate only the gate's rows count. A LoRA layer's B factor counts with them.

    Logged per gate, as `gate/NAME/KEY`:
        mean, below, above: mean gate value, share of |g| < `low`, share of |g| > `high` (of the activation's largest value: 1.9
            of a 2sigmoid), over all heads, channels and real tokens of the step, and all processes. Padding is left out where
            the model gets a 2-d attention mask of the gate's (B, T).
        change: root mean square of g - g0, with g0 what the weights at the start give for the same tokens.
        weight_norm (after the step; absent of a quantised weight), grad_norm (after clipping; absent while frozen, and under
            DeepSpeed).
    Gates read from the scores (`source=lse`, `weights:pairwise`) have values only inside attention: norms and `change`, as the
    root mean square of what each parameter moved, are recorded, and for lse `mean` is that of the sink's logit.

    Warnings, through `logging`:
        saturated: more than `saturated` of the values are shut or fully open, though the gate's spec does not start there; names
            the heads.
        dead: no gradient at all, or none in some heads.
        has not moved: `change` is below `moved`, `after` steps or more since the start (or since `GateWarmup` let go).
        not run: the model did not call it in a measured step.

    Values are read by a forward hook, on the gate or on the projection that holds it, that is there for the measured step only.
    Compiled code calls no hooks that came after it, so in these steps a compiled model runs uncompiled
    (`torch.compiler.set_stance`): the same but for rounding, with the memory of an uncompiled step. If no gate is seen at all,
    the step ends in an UnsupportedError. Sharded parameters are gathered first, since a rank's own rows may be none. Nothing is
    written to the model.

    Args:
        log: where numbers go, such as `trainer.log`, which hands them to every integration; by default `state.log_history`.
        record: a file for a `HealthRecord`, per head, written anew after each measured step; `gated-attn report FILE` draws it. A
            resumed run goes on with it.

    Raises SpecError without gates, RecipeError for impossible numbers, UnsupportedError where parameters are not whole (FSDP1,
    ZeRO-3) or a projection gives some of its channels only (tensor parallelism).

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[GateMonitor(every=50)])
    """

    def __init__(
        self,
        every: int = 50,
        *,
        log: Callable[[dict[str, float]], Any] | None = None,
        record: str | os.PathLike[str] | None = None,
        low: float = 0.05,
        high: float = 0.95,
        saturated: float = 0.95,
        moved: float = 0.01,
        after: int = 100,
    ) -> None:
        if type(every) is not int or every < 1 or after < 0:
            raise RecipeError(f"every={every!r}, after={after!r}: pass numbers of steps, every at least 1")
        if not (0 < low < high < 1 and 0 < saturated < 1 and moved >= 0):
            raise RecipeError(
                f"low={low}, high={high}, saturated={saturated}, moved={moved}: the first two are gate values, 0 < low < high < 1, "
                "saturated is a share, moved at least 0"
            )
        self.every, self.log = every, log
        self.low, self.high, self.saturated, self.moved, self.after = low, high, saturated, moved, after
        self.record = None if record is None else Path(record)
        self._health = HealthRecord(low=low, high=high)
        self._gates: dict[str, Watched] = {}
        self._begun = 0
        self._warned: set[tuple[str, str]] = set()
        self._seen: dict[str, _Seen] = {}
        self._masks: dict[str, Tensor] = {}
        self._open = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._open.close()
        self._seen = {}
        self._gates = watch(model)
        if not self._gates:
            raise SpecError(
                "GateMonitor found no gates in this model; attach gates before building the Trainer, or drop it"
            )
        added = [gate for gate in self._gates.values() if isinstance(gate, WatchedModule)]  # a model's own may rest
        if state.is_world_process_zero and added and not any(gate.trains for gate in added):
            logger.warning(
                "none of the %d gates is trainable (requires_grad=False), so they stay as they are; under PEFT name them in "
                'modules_to_save=["attn_gate"]',
                len(added),
            )
        self._begun = max(state.global_step, frozen_until(state))
        if self.record is not None and self.record.exists() and state.global_step:
            self._health = HealthRecord.load(self.record).until(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._open.close()
        step = state.global_step + 1
        if step != 1 and step % self.every:
            return
        if getattr(args, "torch_compile", False) or any(is_compiled(module) for module in model.modules()):
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
        two_sides = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        for name, gate in self._gates.items():
            self._seen[name] = _Seen(torch.zeros(gate.shape_HG[0], 5, dtype=torch.float64))
            handle = gate.layer.register_forward_hook(self._hook(name, _mask_of(name, gate, two_sides)))
            self._open.callback(handle.remove)
        handle = model.register_forward_pre_hook(self._see_masks, with_kwargs=True)
        self._open.callback(handle.remove)

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if getattr(args, "deepspeed", None) or state.global_step < frozen_until(state):
            return
        for name, seen in self._seen.items():
            if self._gates[name].trains:
                seen.grad, seen.dead = self._gates[name].gradient()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._open.close()
        if not self._seen:
            return
        all_seen, self._seen = self._seen, {}
        _add_over_processes([seen.sums_H5 for seen in all_seen.values()], next(model.parameters()).device)
        if not any(seen.ran for seen in all_seen.values()):
            raise UnsupportedError(
                f"GateMonitor saw none of the {len(all_seen)} gates run in step {state.global_step}: something calls them "
                "without their hooks, such as a forward compiled by hand; compile with torch.compile(model) or "
                "TrainingArguments(torch_compile=True)"
            )
        logs: dict[str, float] = {}
        health: list[GateHealth] = []
        for name, seen in all_seen.items():
            gate, numbers = self._gates[name], _numbers(self._gates[name], seen)
            logs |= {f"gate/{_short(name)}/{key}": value for key, value in numbers.items()}
            health.append(_health(_short(name), gate, seen, numbers))
            if state.is_world_process_zero:
                for kind, text in self._troubles(gate, seen, numbers, state.global_step):
                    self._warn(name, kind, text, state.global_step)
        if self.record is not None and state.is_world_process_zero:
            point = HealthPoint(step=state.global_step, gates=tuple(health))
            self._health = replace(self._health, points=(*self._health.points, point))
            self._health.save(self.record)
        if self.log is not None:
            self.log(logs)
        else:
            state.log_history.append({**logs, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._open.close()
        self._gates = {}

    def _see_masks(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        masks = {name: kwargs.get(name) for name in MASKS}
        self._masks = {name: mask for name, mask in masks.items() if isinstance(mask, Tensor) and mask.dim() == 2}

    def _hook(self, name: str, mask_name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if (
                not torch.compiler.is_compiling()
            ):  # never a part of compiled code, which would outlive the measured step
                self._measure(name, self._masks.get(mask_name), inputs, output)

        return hook

    @torch.no_grad()
    def _measure(self, name: str, mask_BT: Tensor | None, inputs: tuple[Any, ...], output: Any) -> None:
        """Add one call's values to the gate's sums."""
        gate, sums_H5 = self._gates[name], self._seen[name].sums_H5
        if gate.reads_scores:  # a Sink or PairLogits: the values are known inside attention only
            sums_H5[:, 0] += 1
            return
        g_BTHG, start_BTHG = (values.double() for values in gate.values(inputs, output))
        fits = mask_BT is not None and mask_BT.shape == g_BTHG.shape[:2]
        keep_BT = mask_BT.bool().to(g_BTHG.device) if mask_BT is not None and fits else None

        def summed(part_BTHG: Tensor) -> Tensor:
            tokens_NHG = part_BTHG.flatten(0, -3) if keep_BT is None else part_BTHG[keep_BT]
            return tokens_NHG.sum((0, 2), dtype=torch.float64).cpu()

        high = self.high * TOPS.get(gate.spec.activation, 1.0) * (1 + 1e-6)
        sums_H5[:, 0] += summed(torch.ones_like(g_BTHG))
        sums_H5[:, 1] += summed(g_BTHG)
        sums_H5[:, 2] += summed(g_BTHG.abs() < self.low)
        sums_H5[:, 3] += summed(g_BTHG.abs() > high)
        sums_H5[:, 4] += summed((g_BTHG - start_BTHG).square())

    def _troubles(self, gate: Watched, seen: _Seen, numbers: dict[str, float], step: int) -> Iterator[tuple[str, str]]:
        """(kind, what to say) for everything that is wrong with a gate in this step."""
        if not seen.ran:
            yield "not run", f"did not run in step {step}; is its layer skipped?"
            return
        yield from self._saturated(gate, seen, numbers, step)
        if seen.grad == 0:
            yield "dead", f"no gradient in step {step}: the gate cannot learn"
        elif seen.dead:
            yield "dead", f"no gradient in heads {_list(seen.dead)}, step {step}: they cannot learn"
        steps = step - self._begun
        moved, what = (0.1 * DEFAULT_STD, "parameters") if gate.reads_scores else (self.moved, "values")
        if gate.trains and steps >= self.after and numbers.get("change", 1.0) < moved:
            yield (
                "still",
                (
                    f"the gate has not moved: its {what} changed by {numbers['change']:.2g} in {steps} steps, weight norm "
                    f"{numbers['weight_norm']:.3g}; raise gate_lr_mult of param_groups"
                ),
            )

    def _saturated(self, gate: Watched, seen: _Seen, numbers: dict[str, float], step: int) -> Iterator[tuple[str, str]]:
        spec = gate.spec
        if spec.op != "mul" or gate.reads_scores:
            return
        start = abs(float(activate(torch.tensor(spec.start, dtype=torch.float64), spec.activation)))
        n_H, _, below_H, above_H, _ = seen.sums_H5.unbind(-1)
        if start > 1.2 * self.low and numbers["below"] > self.saturated:
            heads = self._worst(below_H / n_H)
            yield "shut", f"{numbers['below']:.0%} of gates < {self.low:g}{heads}, step {step}"
        top = TOPS.get(spec.activation)
        if top is not None and start < 0.98 * self.high * top and numbers["above"] > self.saturated:
            heads = self._worst(above_H / n_H)
            yield "open", f"{numbers['above']:.0%} of gates > {self.high * top:g}{heads}, step {step}"

    def _worst(self, share_H: Tensor) -> str:
        """` (heads 0, 3)`: the heads whose own share is above the limit."""
        heads = [head for head, share in enumerate(share_H.tolist()) if share > self.saturated]
        return f" (heads {_list(heads)})" if len(share_H) > 1 and heads else ""

    def _warn(self, name: str, kind: str, text: str, step: int) -> None:
        if (name, kind) not in self._warned:
            self._warned.add((name, kind))
            number = re.search(r"(?<!\w)\d+(?!\w)", name)
            told = f"{f'layer {number[0]}, ' if number else ''}{_short(name)}: {text}"
            logger.warning("%s", told)
            warned = (*self._health.warnings, HealthWarning(step=step, text=told))
            self._health = replace(self._health, warnings=warned)


def _numbers(gate: Watched, seen: _Seen) -> dict[str, float]:
    """What is logged of a gate; every rank calls it."""
    numbers = {"weight_norm": gate.norm()} if gate.parts else {}
    if seen.grad is not None:
        numbers["grad_norm"] = seen.grad
    n, total, below, above, change = seen.sums_H5.sum(0).tolist()
    if gate.reads_scores:
        found = {"change": gate.moved(), "mean": gate.sink_logit()}
        numbers |= {key: value for key, value in found.items() if value is not None}
    elif n:
        numbers |= {"mean": total / n, "below": below / n, "above": above / n, "change": math.sqrt(change / n)}
    return numbers


def _health(name: str, gate: Watched, seen: _Seen, numbers: dict[str, float]) -> GateHealth:
    """What is recorded of a gate: the same numbers, head by head."""
    n_H, total_H, below_H, above_H, _ = seen.sums_H5.unbind(-1)
    by_head: dict[str, tuple[float, ...]] = {}
    if seen.ran and not gate.reads_scores:
        sums = {"mean": total_H, "below": below_H, "above": above_H}
        by_head = {key: tuple((sum_H / n_H.clamp(min=1)).tolist()) for key, sum_H in sums.items()}
    norms = {key: numbers[key] for key in ("weight_norm", "grad_norm", "change") if key in numbers}
    return GateHealth(name=name, spec=str(gate.spec), **by_head, **norms)  # type: ignore[arg-type]


def _mask_of(name: str, gate: Watched, two_sides: bool) -> str:
    """Which of the model's masks says what is padding among the tokens that a gate reads."""
    words = set(name.split("."))
    reads_memory = gate.spec.position in ("key", "value") and not words.isdisjoint(ON_MEMORY)
    return MASKS[two_sides and "decoder" in words and not reads_memory]


def is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled, as a wrapper or in place."""
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _add_over_processes(tensors: list[Tensor], device: torch.device) -> None:
    """In place, each tensor becomes its sum over all processes, in one collective."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors]).to(device)
    distributed.all_reduce(flat)
    for tensor, piece in zip(tensors, flat.cpu().split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def _short(name: str) -> str:
    """The name of what has the gate, in the model as it was before it was compiled; also of a gate that PEFT keeps a copy of."""
    return re.sub(r"\.attn_gate(\.modules_to_save\.\w+)?$", "", name.removeprefix("_orig_mod."))


def _list(heads: list[int]) -> str:
    return ", ".join(map(str, heads))
