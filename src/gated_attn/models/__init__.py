"""Models built from this package's modules."""

from gated_attn.models.decoder import Decoder, DecoderConfig, DecoderOutput

__all__ = ["Decoder", "DecoderConfig", "DecoderOutput"]
