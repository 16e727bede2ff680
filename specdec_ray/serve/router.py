"""The Router deployment: the front doors and the round loop, on a CPU, without state to lose."""

import asyncio
import logging
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle
from transformers import GenerationConfig

from specdec_ray.config import RoundConfig, SpecdecConfig
from specdec_ray.engine.build import build_grammars, end_token_ids
from specdec_ray.models.loading import id_limit, load_config, load_tokenizer
from specdec_ray.models.support import context_length
from specdec_ray.rounds.lookup import lookup_pool
from specdec_ray.serve.grpc_api import GrpcServer
from specdec_ray.serve.openai import build_http_app
from specdec_ray.serve.pool import ServePool
from specdec_ray.serve.round_client import ConnectionCache
from specdec_ray.serve.service import GenerationService, ServedModel
from specdec_ray.serve.wire import WireLimits
from specdec_ray.speculation.shape import MAX_NODES

logger = logging.getLogger("ray.serve")

DRAIN_S = 30.0


class Router:
    """HTTP comes through Serve's proxy; gRPC has its own server here, because Serve's proxy binds
    every interface and knows no standard health service.

    Args:
        draft: None when no replicas draft.
    """

    _grpc: GrpcServer | None = None  # stays None when the start failed

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: SpecdecConfig, target: DeploymentHandle, draft: DeploymentHandle | None
    ) -> None:
        model = await asyncio.to_thread(_served_model, config)
        self._connections = ConnectionCache(WireLimits(model.context_length, MAX_NODES))

        def pool(handle: DeploymentHandle) -> ServePool:
            return ServePool(handle, self._connections, config.router.lease_timeout_s)

        self._service = GenerationService(
            model,
            pool(target),
            lookup_pool(config.speculation.method) if draft is None else pool(draft),
            config.speculation,
            config.limits,
            config.router.max_generations,
        )
        self._grpc = GrpcServer(self._service)
        port = await self._grpc.start(config.router.grpc_host, config.router.grpc_port)
        logger.info("gRPC on %s:%d", config.router.grpc_host, port)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(self._service)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply a changed `user_config` without a restart."""
        self._service.reconfigure(RoundConfig.model_validate(user_config))

    async def __del__(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(DRAIN_S)
            await self._connections.aclose()


def _served_model(config: SpecdecConfig) -> ServedModel:
    target = config.target
    model_config = load_config(target.source, target.revision)
    tokenizer = load_tokenizer(target.source, target.revision)
    try:
        generation_config = GenerationConfig.from_pretrained(
            target.source, revision=target.revision
        )
    except OSError:
        generation_config = None
    ends = end_token_ids(generation_config, tokenizer)
    vocab_limit = min(id_limit(tokenizer), model_config.get_text_config().vocab_size)
    return ServedModel(
        name=target.name,
        tokenizer=tokenizer,
        end_token_ids=ends,
        context_length=min(
            context_length(model_config), target.kv_cache_tokens - config.speculation.shape.scratch
        ),
        vocab_size=vocab_limit,
        grammars=build_grammars(tokenizer, vocab_limit, ends),
    )
