"""Callbacks of `transformers.Trainer` for models with gates: `GateWarmup` and `GateDecay`; `monitor` has `GateMonitor`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from gated_attn.errors import RecipeError, SpecError, UnsupportedError
from gated_attn.hf.groups import gate_parameters
from gated_attn.hf.native import native_gates

WARMUP = "GateWarmup"


class GateWarmup(TrainerCallback, ExportableState):
    """Keep every gate as it is for the first `freeze_steps` optimizer steps, then let it train.

    The gates stay trainable (`requires_grad`), so DDP and FSDP see the same parameters before and after the switch and need no
    `find_unused_parameters`. While frozen their gradients are dropped as they arrive, so that they are no part of the clipped
    norm (DDP reduces zeros in their place), and are None when the optimizer steps: no moments, no weight decay, no step count.
    FSDP2 sets gradients without calling parameter hooks: there they count in the clipped norm, and are None by the same moment.
    Whether a step is frozen depends on `state.global_step` alone, so a resumed run goes on where it was.

    At step `freeze_steps` the gates start at the learning rate that the schedule has reached by then.

    Raises RecipeError for a negative count and where nothing but gates trains, SpecError without trainable gates,
    UnsupportedError under DeepSpeed, whose optimizer does not read `.grad`, and for a gate that is rows of the query projection
    (Qwen3-Next, Qwen3.5), which cannot wait while the queries train.
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
        if fused := _fused(model):
            raise UnsupportedError(
                f"GateWarmup holds back parameters that are a gate's own; {fused} holds queries as well, and rows of a weight "
                "cannot wait alone; drop GateWarmup"
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
    UnsupportedError where the gates are rows of the query projections (Qwen3-Next, Qwen3.5), which decay as one.
    """

    def __init__(self, weight_decay: float) -> None:
        if not weight_decay >= 0:
            raise RecipeError(f"weight_decay={weight_decay}: must be at least 0")
        self.weight_decay = weight_decay

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        groups = [group for group in optimizer.param_groups if group.get("name") == "gate weights"]
        if not groups and model is not None and (fused := _fused(model)):
            raise UnsupportedError(
                f"GateDecay decays parameters that are a gate's own; {fused} holds queries as well, and an optimizer decays all of "
                "a weight"
            )
        if not groups:
            named = ", ".join(str(group.get("name")) for group in optimizer.param_groups)
            raise RecipeError(
                f"no optimizer group is named 'gate weights' (there are: {named}); build them with param_groups"
            )
        for group in groups:
            group["weight_decay"] = self.weight_decay


def frozen_until(state: Any) -> int:
    """The step at which a `GateWarmup` of the same run lets go; 0 without one."""
    stored = state.stateful_callbacks.get(WARMUP)
    return int(stored["args"]["freeze_steps"]) if isinstance(stored, dict) else 0


def _fused(model: nn.Module) -> str | None:
    """The first trainable projection that holds a gate and queries in one weight."""
    for name, native in native_gates(model).items():
        if native.row.layout != "separate" and any(parameter.requires_grad for parameter in native.layer.parameters()):
            return name
    return None


def _trainable_gates(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in gate_parameters(model).values() if parameter.requires_grad]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
