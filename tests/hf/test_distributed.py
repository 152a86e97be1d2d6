"""DDP and FSDP2 on gloo: gates in every position train in several processes as in one, and their state comes back whole.

Two heads and one key/value head on four ranks, so that some ranks have no row of a gate. Ranks compute in float32 and see a part of
the batch each. By law 5 they may be twice as far from one process with the whole batch in float64 as one process in float32 is that
adds up the gradients of the same parts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from gated_attn import Gate, attach
from gated_attn.errors import UnsupportedError
from gated_attn.hf import families, gates, load_gates, save_gates

LLM = {
    "vocab_size": 97, "hidden_size": 22, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 29,
    "max_position_embeddings": 37,
}  # fmt: skip
GQA = LLM | {"num_key_value_heads": 1, "head_dim": 6}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GQA)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=97, n_embd=22, n_layer=2, n_head=2, n_positions=37, bos_token_id=1, eos_token_id=2, attn_pdrop=0.0,
            resid_pdrop=0.0, embd_pdrop=0.0,
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(
        hf.BertConfig(**LLM, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
}  # fmt: skip
CASES = [
    ("llama", "output:headwise:sigmoid"),
    ("llama", "output:elementwise:sigmoid,fill"),
    ("llama", "output:shared:sigmoid"),
    ("llama", "output:headwise:sigmoid,source=lse,fill"),
    ("llama", "weights:pairwise:sigmoid,bias=1"),
    ("llama", "value:headwise:sigmoid,fill"),
    ("llama", "key:elementwise:sigmoid"),
    ("llama", "query:headwise:sigmoid"),
    ("llama", "dense:elementwise:sigmoid,fill"),
    ("qwen3", "output:elementwise:sigmoid"),
    ("qwen3", "value:elementwise:sigmoid"),
    ("qwen3", "key:headwise:sigmoid"),
    ("qwen3", "query:elementwise:sigmoid,source=query"),
    ("qwen3", "dense:headwise:sigmoid"),
    ("gpt2", "output:headwise:sigmoid,fill"),
    ("gpt2", "value:elementwise:sigmoid"),
    ("gpt2", "key:headwise:sigmoid"),
    ("gpt2", "query:elementwise:sigmoid"),
    ("gpt2", "dense:headwise:sigmoid,fill"),
    ("bert", "output:elementwise:sigmoid"),
    ("bert", "dense:elementwise:sigmoid"),
]
WAYS = ("ddp", "layers", "modules")
"""DDP; FSDP2 with the model's layers as units; FSDP2 with attention modules and their projections as units. `gates`: gates, too."""
STEPS, ROWS, TOKENS = 2, 8, 5


def build(name: str, spec: str, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    model = MODELS[name]().double()
    for parameter in model.parameters():  # far from the start, so that attention matters
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    attach(model, spec)
    for gate in gates(model).values():
        for parameter in gate.parameters():
            nn.init.normal_(parameter, std=5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return model.float().train()


def tokens() -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randint(3, 90, (ROWS, TOKENS), generator=made) for _ in range(STEPS)]


def trained(model: Any, forward: Any, batches: list[Tensor], pieces: int = 1) -> Any:
    """SGD steps: an update is as large as its gradient, so an error of one is seen in the other."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for ids in batches:
        for part in ids.chunk(pieces):
            (forward(input_ids=part, labels=part).loss / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def shard(model: Any, way: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = list(families.find(model))
    if way in ("modules", "gates"):
        for row in found:
            for layer in row.module.children():
                if any(True for _ in layer.parameters()) and (way == "gates" or not isinstance(layer, Gate)):
                    fully_shard(layer, mesh=mesh)
            within = not row.family.out.startswith("../")  # BERT has the out projection beside its attention
            fully_shard(row.module if within else model.get_submodule(row.name.rpartition(".")[0]), mesh=mesh)
    else:
        layers = {name: m for name, m in model.named_modules() if name and name.rpartition(".")[2].isdigit()}
        for layer in layers.values():
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def rank_main(rank: int, world: int, folder: Path, names: list[str], ways: list[str]) -> None:
    """What each process does: every case in every way, in one go, since starting is what takes the time."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[tuple[str, str, str], Any] = {}
    cases = [tuple(name.split(" ", 1)) for name in names] or CASES
    for (name, spec), way in ((case, way) for case in cases for way in ways):
        model = build(name, spec)
        if way == "ddp":
            wrapped: Any = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = shard(model, way)
        trained(model, wrapped, [ids.chunk(world)[rank] for ids in tokens()])
        own = [p for gate in gates(model).values() for p in gate.parameters()]
        empty = sum(p.to_local().numel() == 0 for p in own if hasattr(p, "to_local"))
        state = get_model_state_dict(model, options=full)
        saved = folder / f"{len(found)}"
        save_gates(model, saved)
        again = build(name, spec, seed=8)
        again = again if way == "ddp" else shard(again, way)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(again, dict(state) if rank == 0 else {}, options=options)
        same = all(torch.equal(whole(p), whole(q)) for p, q in zip(model.parameters(), again.parameters(), strict=True))
        counts = torch.tensor([empty, int(same)])
        torch.distributed.all_reduce(counts)
        found[name, spec, way] = {"state": state, "saved": saved, "empty": int(counts[0]), "same": int(counts[1])}
    if rank == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.barrier()
    # torch 2.13 aborts now and then while the interpreter shuts down after gloo, with a bare fully_shard as well; so this
    # process leaves without that.
    os._exit(0)


START = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_distributed import rank_main
rank_main(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), [n for n in sys.argv[5].split("|") if n], sys.argv[6].split())
"""


def launch(folder: Path, world: int, names: list[str], ways: tuple[str, ...]) -> Any:
    """The answer of `rank_main` on `world` processes; the first that fails ends the others."""
    logs = [folder / f"rank{rank}.txt" for rank in range(world)]
    words = ["|".join(names), " ".join(ways)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-c", START, str(Path(__file__).parent), str(rank), str(world), str(folder), *words]
        with log.open("w") as output:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
    try:
        until = time.monotonic() + 400
        while any(one.poll() is None for one in ranks) and not any(one.poll() for one in ranks):
            assert time.monotonic() < until, [log.read_text()[-500:] for log in logs]
            time.sleep(0.1)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert not any(one.returncode for one in ranks), "\n\n".join(log.read_text()[-3000:] for log in logs)
    return torch.load(folder / "found.pt", weights_only=False)


def check(name: str, spec: str, way: str, got: Any, world: int) -> None:
    """The parameters are those of one process, and each form in which they are kept gives the same model."""
    start = build(name, spec)
    exact = trained(start.double(), start, tokens()).state_dict()
    start = {key: value.clone() for key, value in build(name, spec).state_dict().items()}
    alone = build(name, spec)
    trained(alone, alone, tokens(), pieces=world)
    state, single = got["state"], alone.state_dict()
    assert state.keys() == exact.keys()
    for mine in (True, False):  # gates, and all else
        keys = [key for key in exact if (".attn_gate." in key) == mine]
        assert all(bool((exact[key] - start[key]).abs().max() > 1e-4) for key in keys if mine), "every gate is trained"
        size = max(float(exact[key].abs().max()) for key in keys)
        plain = max(float((single[key] - exact[key]).abs().max()) for key in keys)
        for key in keys:
            error = float((state[key] - exact[key]).abs().max())
            assert error <= 2 * plain + torch.finfo(torch.float32).eps * size, (name, spec, way, key, error, plain)
    if way == "layers" and "headwise" in spec and world > 2 and "source=lse" not in spec:
        assert got["empty"] > 0, "more ranks than heads"
    assert got["same"] == world, "broadcast into a sharded model of other values"
    alone.load_state_dict(state)
    base = build(name, spec, seed=8)
    other = MODELS[name]().float().train()
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not missing
    assert all(".attn_gate." in key for key in unexpected)
    load_gates(other, got["saved"])
    ids = tokens()[0]
    with torch.no_grad():
        want = alone(input_ids=ids).logits
        assert torch.equal(other(input_ids=ids).logits, want)
        assert not torch.equal(base(input_ids=ids).logits, want)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    case = ("llama", "output:elementwise:sigmoid,fill")
    found = launch(tmp_path, 2, [" ".join(case)], ("ddp", "layers"))
    assert list(found) == [(*case, "ddp"), (*case, "layers")]
    for (name, spec, way), got in found.items():
        check(name, spec, way, got, 2)


@pytest.mark.slow
def test_four_ranks_of_two_heads_train_as_one_process(tmp_path: Path) -> None:
    found = launch(tmp_path, 4, [], WAYS)
    assert len(found) == len(CASES) * len(WAYS)
    for (name, spec, way), got in found.items():
        check(name, spec, way, got, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "output:headwise:sigmoid,source=lse,bias=1,sink_key",
        "weights:pairwise:sigmoid,bias=1",
        "output:elementwise:sigmoid",
    ],
)
def test_a_gate_may_be_a_unit_of_its_own(tmp_path: Path, spec: str) -> None:
    found = launch(tmp_path, 2, [f"llama {spec}"], ("gates",))
    check("llama", spec, "gates", found["llama", spec, "gates"], 2)


def test_a_fill_cannot_be_sharded_with_its_gate_alone() -> None:
    gate = Gate("output:headwise,fill", 8, 2)
    gate.unshard = None  # type: ignore[assignment]
    gate.fill.fill_HE.full_tensor = None  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="call fully_shard on the attention module or the layer"):
        gate.modulate(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 8))
