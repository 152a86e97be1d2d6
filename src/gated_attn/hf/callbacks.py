"""Callbacks of `transformers.Trainer` for models with gates: `GateWarmup`, `GateDecay`, `GateMonitor`.

Shapes: B batch, T tokens, H heads (1 for shared and dense gates), G gate width (1 or E).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from gated_attn.attention.activations import activate
from gated_attn.errors import RecipeError, SpecError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf.groups import gate_parameters
from gated_attn.spec import DEFAULT_STD

logger = logging.getLogger(__name__)

WARMUP = "GateWarmup"
TOPS = {"sigmoid": 1.0, "2sigmoid": 2.0, "nssigmoid": 1.0, "hardsigmoid": 1.0, "tanh": 1.0}
"""Largest value of the activations that have one; only such a gate can be saturated open."""


class GateWarmup(TrainerCallback, ExportableState):
    """Keep every gate as it is for the first `freeze_steps` optimizer steps, then let it train.

    The gates stay trainable (`requires_grad`), so DDP and FSDP see the same parameters before and after the switch and need no
    `find_unused_parameters`. While frozen their gradients are dropped as they arrive, so that they are no part of the clipped
    norm (DDP reduces zeros in their place), and are None when the optimizer steps: no moments, no weight decay, no step count.
    FSDP2 sets gradients without calling parameter hooks: there they count in the clipped norm, and are None by the same moment.
    Whether a step is frozen depends on `state.global_step` alone, so a resumed run goes on where it was.

    At step `freeze_steps` the gates start at the learning rate that the schedule has reached by then.

    Raises RecipeError for a negative count and where nothing but gates trains, SpecError without trainable gates,
    UnsupportedError under DeepSpeed, whose optimizer does not read `.grad`.
    """

    def __init__(self, freeze_steps: int) -> None:
        if type(freeze_steps) is not int or freeze_steps < 0:
            raise RecipeError(f"freeze_steps={freeze_steps!r}: pass a number of optimizer steps, at least 0")
        self.freeze_steps = freeze_steps
        self._handles: list[Any] = []

    def state(self) -> dict[str, Any]:
        return {"args": {"freeze_steps": self.freeze_steps}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._release()
        state.stateful_callbacks[WARMUP] = self.state()  # a resumed state has the earlier run's
        if state.global_step >= self.freeze_steps:
            return
        if getattr(args, "deepspeed", None):
            raise UnsupportedError(
                "GateWarmup does not work under DeepSpeed; use param_groups and a schedule of its own"
            )
        gates = _trainable_gates(model)
        if not gates:
            raise SpecError("GateWarmup found no trainable gate; attach gates before building the Trainer, or drop it")
        if len(gates) == sum(parameter.requires_grad for parameter in model.parameters()):
            raise RecipeError(
                f"only gates are trainable, so {self.freeze_steps} steps with frozen gates would train nothing; drop GateWarmup"
            )
        self._handles = [parameter.register_post_accumulate_grad_hook(_drop_gradient) for parameter in gates]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step < self.freeze_steps:
            for parameter in gate_parameters(model).values():
                parameter.grad = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.freeze_steps:
            self._release()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._release()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class GateDecay(TrainerCallback):
    """Set the weight decay of the gate weights when training begins, after a checkpoint has brought the earlier one back.

    The optimizer's groups must be those of `param_groups`; its moments and steps stay as they are. RecipeError without them.
    """

    def __init__(self, weight_decay: float) -> None:
        if not weight_decay >= 0:
            raise RecipeError(f"weight_decay={weight_decay}: must be at least 0")
        self.weight_decay = weight_decay

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        groups = [group for group in optimizer.param_groups if group.get("name") == "gate weights"]
        if not groups:
            named = ", ".join(str(group.get("name")) for group in optimizer.param_groups)
            raise RecipeError(
                f"no optimizer group is named 'gate weights' (there are: {named}); build them with param_groups"
            )
        for group in groups:
            group["weight_decay"] = self.weight_decay


@dataclass
class _Watched:
    """One gate in one measured step: sums over tokens and channels, per head: n, g, shut, open, (g - start)^2."""

    sums_H5: Tensor
    grad: float | None = None
    dead: list[int] = field(default_factory=list)


class GateMonitor(TrainerCallback):
    """Log every gate's health at the first step and at every `every`-th, and warn once per gate and kind of trouble.

    Logged per gate, as `gate/NAME/KEY`:
        mean, below, above: mean gate value, share of |g| < `low`, share of |g| > `high` (of the activation's largest value: 1.9
            of a 2sigmoid), over all heads, channels and real tokens of the step, and all processes. Padding is left out where
            the model gets a 2-d attention mask of the gate's (B, T).
        change: root mean square of g - g0, with g0 what the weights at the start give for the same tokens.
        weight_norm (after the step), grad_norm (after clipping; absent while frozen, and under DeepSpeed).
    Gates read from the scores (`source=lse`, `weights:pairwise`) have values only inside attention: norms and `change`, as the
    root mean square of what each parameter moved, are recorded, and for lse `mean` is that of the sink's logit.

    Warnings, through `logging`:
        saturated: more than `saturated` of the values are shut or fully open, though the gate did not start there; names the heads.
        dead: no gradient at all, or none in some heads.
        has not moved: `change` is below `moved`, `after` steps or more since the start (or since `GateWarmup` let go).
        not run: the model did not call it in a measured step.

    Gates are read by a forward hook that is there for the measured step only. Compiled code calls no hooks that came after it, so
    in these steps a compiled model runs uncompiled (`torch.compiler.set_stance`): the same but for rounding, with the memory of
    an uncompiled step. If no gate is seen at all, the step ends in an UnsupportedError. Sharded parameters are gathered first,
    since a rank's own rows may be none. Nothing is written to the model.

    Args:
        log: where numbers go, such as `trainer.log`, which hands them to every integration; by default `state.log_history`.

    Raises SpecError without gates, RecipeError for impossible numbers, UnsupportedError where parameters are not whole (FSDP1,
    ZeRO-3).

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[GateMonitor(every=50)])
    """

    def __init__(
        self,
        every: int = 50,
        *,
        log: Callable[[dict[str, float]], Any] | None = None,
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
        self._starts: dict[str, Gate] = {}
        self._begun = 0
        self._warned: set[tuple[str, str]] = set()
        self._watched: dict[str, _Watched] = {}
        self._masks: dict[str, Tensor] = {}
        self._open = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._open.close()
        self._watched = {}
        gates = _gates(model)
        if not gates:
            raise SpecError(
                "GateMonitor found no gates in this model; attach gates before building the Trainer, or drop it"
            )
        sharded = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
        if sharded or any(p.numel() == 0 and not hasattr(p, "full_tensor") for p in gate_parameters(model).values()):
            raise UnsupportedError(
                "GateMonitor reads whole gates, and these are flattened or kept elsewhere (FSDP1, ZeRO-3); use fsdp_version 2"
            )
        self._starts = {name: _twin(gate) for name, gate in gates.items()}
        self._begun = max(state.global_step, _frozen_until(state))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._open.close()
        step = state.global_step + 1
        if step != 1 and step % self.every:
            return
        if getattr(args, "torch_compile", False) or any(_is_compiled(module) for module in model.modules()):
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._watched = {
            name: _Watched(torch.zeros(g.shape_HG[0], 5, dtype=torch.float64)) for name, g in _gates(model).items()
        }
        for name, gate in _gates(model).items():
            handle = gate.register_forward_hook(self._hook(name, model))
            self._open.callback(handle.remove)
        handle = model.register_forward_pre_hook(self._see_masks, with_kwargs=True)
        self._open.callback(handle.remove)

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self._watched or getattr(args, "deepspeed", None) or state.global_step < _frozen_until(state):
            return
        for name, gate in _gates(model).items():
            if any(parameter.requires_grad for parameter in gate.parameters()):
                self._watched[name].grad, self._watched[name].dead = _gradient(gate)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._open.close()
        if not self._watched:
            return
        watched, self._watched = self._watched, {}
        _add_over_processes([one.sums_H5 for one in watched.values()], next(model.parameters()).device)
        if not any(one.sums_H5[:, 0].any() for one in watched.values()):
            raise UnsupportedError(
                f"GateMonitor saw none of the {len(watched)} gates run in step {state.global_step}: something calls them "
                "without their hooks, such as a forward compiled by hand; compile with torch.compile(model) or "
                "TrainingArguments(torch_compile=True)"
            )
        logs: dict[str, float] = {}
        gates = _gates(model)
        for name, one in watched.items():
            numbers = self._numbers(name, gates[name], one)
            logs |= {f"gate/{_short(name)}/{key}": value for key, value in numbers.items()}
            if state.is_world_process_zero:
                self._judge(name, gates[name], one, numbers, state)
        if self.log is not None:
            self.log(logs)
        else:
            state.log_history.append({**logs, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._open.close()

    def _see_masks(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        names = ("attention_mask", "decoder_attention_mask")
        masks = {name: kwargs.get(name) for name in names}
        self._masks = {name: mask for name, mask in masks.items() if isinstance(mask, Tensor) and mask.dim() == 2}

    def _hook(self, name: str, model: nn.Module) -> Callable[..., None]:
        two = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        words = name.split(".")

        @torch.no_grad()
        def measure(gate: Gate, inputs: tuple[Any, ...], output: Any) -> None:
            one = self._watched[name]
            if not isinstance(output, Tensor):  # a Sink or PairLogits: the values are known inside attention only
                one.sums_H5[:, 0] += 1
                return
            memory = gate.spec.position in ("key", "value") and not {
                "EncDecAttention",
                "encoder_attn",
                "crossattention",
            }.isdisjoint(words)
            mask = self._masks.get(
                "decoder_attention_mask" if two and "decoder" in words and not memory else "attention_mask"
            )
            g = _whole(output).double()
            start = _whole(self._starts[name](*inputs)).double()
            kept = g.shape[:2] if mask is None or mask.shape != g.shape[:2] else mask.bool().to(g.device)
            pick: Any = (lambda x: x.flatten(0, 1)) if isinstance(kept, tuple) else (lambda x: x[kept])
            high = self.high * TOPS.get(gate.spec.activation, 1.0)
            parts = (torch.ones_like(g), g, g.abs() < self.low, g.abs() > high * (1 + 1e-6), (g - start).square())
            one.sums_H5 += torch.stack([pick(part).double().sum((0, 2)) for part in parts], -1).cpu()

        def hook(gate: Gate, inputs: tuple[Any, ...], output: Any) -> None:
            if (
                not torch.compiler.is_compiling()
            ):  # never a part of compiled code, which would outlive the measured step
                measure(gate, inputs, output)

        return hook

    @torch.no_grad()
    def _numbers(self, name: str, gate: Gate, one: _Watched) -> dict[str, float]:
        n, total, below, above, change = one.sums_H5.sum(0).tolist()
        pairs = [
            (_whole(p).double().cpu(), q.double().cpu())
            for (_, p), (_, q) in zip(gate.named_parameters(), self._starts[name].named_parameters(), strict=True)
        ]
        numbers = {"weight_norm": math.sqrt(sum(float(p.square().sum()) for p, _ in pairs))}
        if one.grad is not None:
            numbers["grad_norm"] = one.grad
        if _reads_scores(gate):
            squares, size = sum(float((p - q).square().sum()) for p, q in pairs), sum(p.numel() for p, _ in pairs)
            numbers["change"] = math.sqrt(squares / size)
            if gate.bias is not None and gate.spec.source == "lse":
                numbers["mean"] = float(_whole(gate.bias).double().mean())
        elif n:
            numbers |= {"mean": total / n, "below": below / n, "above": above / n, "change": math.sqrt(change / n)}
        return numbers

    def _judge(self, name: str, gate: Gate, one: _Watched, numbers: dict[str, float], state: Any) -> None:
        step, start, spec = state.global_step, gate.spec.start, gate.spec
        if not one.sums_H5[:, 0].any():
            self._warn(name, "not run", f"did not run in step {step}; is its layer skipped?")
            return
        if spec.op == "mul" and not _reads_scores(gate):
            at = abs(float(activate(torch.tensor(start, dtype=torch.float64), spec.activation)))
            top = TOPS.get(spec.activation)
            n_H, _, below_H, above_H, _ = one.sums_H5.unbind(-1)
            if at > 1.2 * self.low and numbers["below"] > self.saturated:
                self._warn(
                    name,
                    "shut",
                    f"{numbers['below']:.0%} of gates < {self.low:g}{self._worst(below_H / n_H)}, step {step}",
                )
            if top is not None and at < 0.98 * self.high * top and numbers["above"] > self.saturated:
                high = self.high * top
                self._warn(
                    name, "open", f"{numbers['above']:.0%} of gates > {high:g}{self._worst(above_H / n_H)}, step {step}"
                )
        if one.grad == 0:
            self._warn(name, "dead", f"no gradient in step {step}: the gate cannot learn")
        elif one.dead:
            self._warn(name, "dead", f"no gradient in heads {_list(one.dead)}, step {step}: they cannot learn")
        trained = any(parameter.requires_grad for parameter in gate.parameters())
        steps = step - self._begun
        reads = _reads_scores(gate)
        if (
            trained
            and steps >= self.after
            and numbers.get("change", 1.0) < (0.1 * DEFAULT_STD if reads else self.moved)
        ):
            self._warn(
                name, "still",
                f"the gate has not moved: its {'parameters' if reads else 'values'} changed by {numbers['change']:.2g} in "
                f"{steps} steps, weight norm {numbers['weight_norm']:.3g}; raise gate_lr_mult of param_groups",
            )  # fmt: skip

    def _worst(self, share_H: Tensor) -> str:
        """` (heads 0, 3 most)`: the heads whose own share is above the limit."""
        heads = [head for head, share in enumerate(share_H.tolist()) if share > self.saturated]
        return f" (heads {_list(heads)})" if len(share_H) > 1 and heads else ""

    def _warn(self, name: str, kind: str, text: str) -> None:
        if (name, kind) not in self._warned:
            self._warned.add((name, kind))
            number = re.search(r"(?<!\w)\d+(?!\w)", name)
            logger.warning("%s%s: %s", f"layer {number[0]}, " if number else "", _short(name), text)


def _gates(model: nn.Module) -> dict[str, Gate]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Gate)}


def _trainable_gates(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in gate_parameters(model).values() if parameter.requires_grad]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _frozen_until(state: Any) -> int:
    """The step at which a `GateWarmup` of the same run lets go; 0 without one."""
    stored = state.stateful_callbacks.get(WARMUP)
    return int(stored["args"]["freeze_steps"]) if isinstance(stored, dict) else 0


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; every rank calls it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _twin(gate: Gate) -> Gate:
    """A copy with whole parameters that neither trains nor follows."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(_whole(p.detach()).clone(), requires_grad=False) for p in gate.parameters()
    }
    return copy.deepcopy(gate, memo)


def _reads_scores(gate: Gate) -> bool:
    return gate.spec.source == "lse" or gate.spec.width == "pairwise"


def _gradient(gate: Gate) -> tuple[float, list[int]]:
    """(norm of the whole gate's gradient, heads whose every row has none)."""
    H = gate.shape_HG[0]
    total, rows_H = 0.0, torch.zeros(H, dtype=torch.float64)
    per_head = False
    for name, parameter in gate.named_parameters():
        if parameter.grad is None or not parameter.requires_grad:
            continue
        grad = _whole(parameter.grad).double().cpu()
        total += float(grad.square().sum())
        outer = name in ("proj.weight", "proj.bias", "bias", "sink_key")
        if outer and gate.spec.source != "query" and gate.spec.width != "pairwise" and len(grad) % H == 0:
            rows_H += grad.reshape(H, -1).square().sum(1)
            per_head = True
    dead = [head for head in range(H) if rows_H[head] == 0] if per_head and H > 1 else []
    return math.sqrt(total), dead


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
    """The name of what has the gate, in the model as it was before it was compiled."""
    return name.removeprefix("_orig_mod.").removesuffix(".attn_gate")


def _list(heads: list[int]) -> str:
    return ", ".join(map(str, heads))
