"""Exact speculative decoding on Ray Serve, draft and target in separate actors."""

from specdec_ray.decoder import Generation, SpeculativeDecoder

__version__ = "0.1.0"

__all__ = ["Generation", "SpeculativeDecoder", "__version__"]
