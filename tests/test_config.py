from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from specdec_ray import config as config_module
from specdec_ray.config import SpecdecConfig, parse_config
from specdec_ray.errors import ConfigError
from specdec_ray.rounds.request import RoundSettings

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_nothing_given_is_the_bundled_pair():
    config = parse_config({})
    assert config.target.source.endswith("bundled/target")
    assert config.draft.source.endswith("bundled/draft")


def tree(**fields):
    return {"speculation": {"tree": fields}}


BAD = [
    ({"targt": {}}, "targt"),
    ({"target": {"modell": "x"}}, "target.modell"),
    ({"speculation": {"draft_tokens": -1}}, "speculation.draft_tokens"),
    ({"speculation": {"draft_tokens": 65}}, "speculation.draft_tokens"),
    ({"speculation": {"rule": "lucky"}}, "speculation.rule"),
    ({"speculation": {"method": "none"}, "draft": {"model": "x"}}, "remove the draft section"),
    ({"speculation": {"method": "suffix"}, "draft": {}}, "'suffix' runs no draft"),
    ({"draft": None}, "needs a draft"),
    ({"target": {"device": "cuda", "device_map": "auto"}}, "exclude each other"),
    ({"target": {"kv_cache_tokens": 16, "block_size": 16}}, "kv_cache_tokens"),
    ({"target": {"dtype": "int3"}}, "target.dtype"),
    ({"router": {"grpc_port": 70000}}, "router.grpc_port"),
    ({"limits": {"max_tokens": 0}}, "limits.max_tokens"),
    (tree(), "one of branching"),
    (tree(branching=[2], choices=[[0]]), "one of branching"),
    (tree(branching=[]), "1 to 64 nodes, not 0"),
    (tree(branching=[8, 8]), "1 to 64 nodes, not 72"),
    (tree(branching=[2, 0]), "speculation.tree.branching.1"),
    (tree(choices=[[0], [0, 1]]), r"choices: \[0, 1\] needs \[0, 0\]"),
    (tree(dynamic={"width": 3, "depth": 2}), "speculation.tree.dynamic.nodes"),
    (
        {"speculation": {"method": "prompt_lookup", "tree": {"branching": [2]}}},
        "'prompt_lookup' proposes no trees",
    ),
]


@pytest.mark.parametrize(("args", "named"), BAD)
def test_what_is_wrong_is_named(args, named):
    with pytest.raises(ConfigError, match=named):
        parse_config(args)


def test_k_is_five_or_the_whole_tree():
    for args, expected in [
        ({}, 5),
        ({"draft_tokens": 3}, 3),
        ({"tree": {"branching": [4, 2]}}, 12),
        ({"tree": {"choices": [[0], [1], [0, 0]]}, "draft_tokens": 2}, 2),
        ({"tree": {"dynamic": {"width": 4, "depth": 3, "nodes": 20}}}, 20),
    ]:
        speculation = parse_config({"speculation": args}).speculation
        assert RoundSettings.of(speculation.rounds, speculation).draft_tokens == expected


def test_every_field_is_documented():
    models = [m for m in vars(config_module).values() if isinstance(m, type)]
    for model in models:
        if issubclass(model, BaseModel) and model not in (BaseModel, SpecdecConfig):
            for name, field in model.model_fields.items():
                assert field.description, f"{model.__name__}.{name}"


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path):
    """Serve ignores unknown keys at every level, so typos in its own keys are looked for too."""
    serve = yaml.safe_load(path.read_text())
    assert set(serve) <= {"proxy_location", "http_options", "applications", "logging_config"}
    for application in serve["applications"]:
        known = {"name", "route_prefix", "import_path", "args", "deployments", "runtime_env"}
        assert set(application) <= known
        assert application["import_path"] == "specdec_ray.serve:build_app"
        parse_config(application["args"])


def test_rounds_settings_and_config_have_the_same_fields():
    fields = set(RoundSettings.__dataclass_fields__) - {"self_drafting"}
    assert set(config_module.RoundConfig.model_fields) == fields
