import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_code_is_what_the_protos_give(tmp_path):
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(tmp_path)
    kept = ROOT / "specdec_ray" / "pb"
    generated = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {p.name: p.read_text() for p in kept.iterdir() if "_pb2" in p.name}
    assert generated == committed, "run `make protos`"


def test_protos_pass_buf_lint():
    buf = Path(sys.executable).with_name("buf")
    result = subprocess.run([buf, "lint"], cwd=ROOT / "protos", capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
