"""The application builder that a Serve config names: `import_path: specdec_ray.serve:build_app`."""

from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from specdec_ray.config import ModelConfig, SpecdecConfig, parse_config
from specdec_ray.serve.engine_replica import DraftReplica, TargetReplica
from specdec_ray.serve.router import Router

# Idle OpenMP threads must sleep: two actors on the same cores would fight by spinning.
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def build_app(args: dict[str, Any]) -> serve.Application:
    """Build the application from the `args` of a Serve config.

    Raises:
        ConfigError: unknown keys, values out of range, impossible combinations.
    """
    config = parse_config(args)
    target = _engine(TargetReplica, "Target", config.target, config)
    draft = None
    if config.draft is not None and config.speculation.uses_draft:
        draft = _engine(DraftReplica, "Draft", config.draft, config)
    router = serve.deployment(
        serve.ingress()(Router),
        name="Router",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4 * config.router.max_generations,  # the router refuses by itself
        user_config=config.speculation.rounds.model_dump(mode="json"),
        graceful_shutdown_timeout_s=60,
        logging_config=_logging(config),
    )
    return router.bind(config, target, draft)


def _engine(
    replica: type[TargetReplica | DraftReplica],
    name: str,
    model: ModelConfig,
    config: SpecdecConfig,
) -> serve.Application:
    deployment = serve.deployment(
        replica,
        name=name,
        ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": PASSIVE_THREADS}},
        max_ongoing_requests=model.max_sessions,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,
        logging_config=_logging(config),
    )
    return deployment.bind(config)


def _logging(config: SpecdecConfig) -> LoggingConfig:
    observability = config.observability
    return LoggingConfig(
        encoding=observability.log_encoding,
        log_level=observability.log_level,
        enable_access_log=False,
    )
