"""What gates change in a model that is trained with them: the same text, diagnosed before and after, paired head by head."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gated_attn import attach
from gated_attn.hf import param_groups
from gated_attn.measure.capture import capture
from gated_attn.measure.diagnose import diagnose
from gated_attn.records import diff

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = LlamaForCausalLM(config)
held_out = [{"input_ids": torch.randint(64, (8, 96))}]
before = diagnose(model, held_out, text="random tokens", sink_tokens=32)

# Each token is followed by the one that is 7 further, except that every ninth position repeats the sequence's first token.
attach(model, "output:headwise:sigmoid")
optimizer = torch.optim.AdamW(param_groups(model, 3e-3, gate_lr_mult=3))
for _ in range(60):
    ids = (torch.randint(64, (16, 1)) + 7 * torch.arange(48)) % 64
    ids[:, ::9] = ids[:, :1]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

after = diagnose(model, held_out, text="random tokens", sink_tokens=32)
print(after)
print()
print(diff(before, after))

# The same, of one layer, while the model writes: whatever it is used for can be watched.
with capture(model, layers=[1]) as seen, torch.no_grad():
    model.generate(ids[:2, :20], max_new_tokens=20, do_sample=False, pad_token_id=0)
(layer,) = seen.attention.values()
print(
    f"\nlayer 1 while writing: {layer.queries} queries, share on the first token by head",
    *map("{:.3f}".format, layer.first.value(4)),
)
