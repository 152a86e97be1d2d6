"""A token in front of every text becomes part of the model: gates with its key and value, and the same logits without it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gated_attn import detach, verify
from gated_attn.adapt.sinks import absorb_sink
from gated_attn.hf import gates

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = LlamaForCausalLM(config).eval()
BOS = 1
text = torch.randint(2, 64, (2, 20))
in_front = torch.cat([torch.full((2, 1), BOS), text], 1)

with torch.no_grad():
    with_token, without = model(in_front).logits[:, 1:], model(text).logits
    absorb_sink(model, BOS)
    gated = model(text).logits
print(f"largest difference from the model with the token in front: {(gated - with_token).abs().max():.1e}")
print(f"and from the model that never saw it:                      {(gated - without).abs().max():.1e}")
print(next(iter(gates(model).values())))

# An ordinary gated model: it is verified, writes with a cache, and gives the model back that it was.
print(verify(model, {"input_ids": text}))
print(model.generate(text[:, :5], max_new_tokens=5, do_sample=False, pad_token_id=0))
with torch.no_grad():
    print("as it was:", torch.equal(detach(model)(text).logits, without))
