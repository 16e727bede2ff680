"""The Ray Serve application."""

from specdec_ray.serve.app import build_app

__all__ = ["build_app"]
