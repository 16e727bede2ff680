"""The OpenAI-compatible HTTP front door."""

from specdec_ray.serve.openai.app import build_http_app

__all__ = ["build_http_app"]
