"""Gates inside other people's models. Importing it lets the Auto classes of transformers load saved models with gates."""

from importlib.util import find_spec

if find_spec("transformers") is not None:  # the checkpoint layouts are of use without it
    from gated_attn.hf import config as _config  # noqa: F401 - it registers itself
