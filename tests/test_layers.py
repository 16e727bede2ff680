"""What the source tree promises: layers import one way, and the wire carries no pickles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "specdec_ray"
LAYERS = ["sampling", "speculation", "models", "engine", "rounds", "serve"]
SOURCES = [p for p in PACKAGE.rglob("*.py") if "pb" not in p.relative_to(PACKAGE).parts]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_those_below(layer):
    above = LAYERS[LAYERS.index(layer) + 1 :]
    for path in (PACKAGE / layer).rglob("*.py"):
        for module in imports(path):
            parts = module.split(".")
            assert not (parts[0] == "specdec_ray" and parts[1:2] and parts[1] in above), (
                f"{path.relative_to(PACKAGE)} imports {module}"
            )


def test_only_serve_knows_ray_and_the_core_is_pure_torch():
    for path in SOURCES:
        layer = path.relative_to(PACKAGE).parts[0]
        roots = {module.split(".")[0] for module in imports(path)}
        assert layer == "serve" or "ray" not in roots, path
        assert layer not in ("sampling", "speculation") or "transformers" not in roots, path


def test_nothing_unpickles_or_evaluates():
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        roots = {module.split(".")[0] for module in imports(path)}
        assert not roots & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not {"eval", "exec"} & {getattr(function, "id", "") for function in calls}, path
