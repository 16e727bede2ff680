"""Regenerate `specdec_ray/pb` from the protos beside this file: `python protos/generate.py [OUT]`.

The generated modules lie flat in one package; protoc's import of `specdec.v1` is rewritten to it,
while the descriptors keep the protos' own paths.
"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
PACKAGE = PROTOS.parent / "specdec_ray" / "pb"
SOURCES = ("inference", "rounds")


def generate(out: Path) -> None:
    """Write the generated modules into `out`.

    Raises:
        RuntimeError: protoc refused the protos; it has printed why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        flags = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        files = [f"specdec/v1/{name}.proto" for name in SOURCES]
        if protoc.main(["protoc", f"-I{PROTOS}", *flags, *files]) != 0:
            raise RuntimeError("protoc failed")
        for path in sorted(Path(scratch, "specdec", "v1").iterdir()):
            text = path.read_text().replace("from specdec.v1 import", "from specdec_ray.pb import")
            (out / path.name).write_text(text)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    target.mkdir(parents=True, exist_ok=True)
    generate(target)
