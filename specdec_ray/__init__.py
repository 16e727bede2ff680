"""Exact speculative decoding on Ray Serve, draft and target in separate actors."""

from specdec_ray.decoder import Generation, SpeculativeDecoder

__all__ = ["Generation", "SpeculativeDecoder"]
