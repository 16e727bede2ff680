"""The pair that comes with the package, for serving on a laptop with no hub. See README.md here;
`python -m specdec_ray.bundled.recipe` makes it."""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
