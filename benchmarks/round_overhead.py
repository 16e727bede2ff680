"""What a router adds to a round, on a real cluster of this machine: time, and its own CPU.

The median gap between a stream's chunks, one per round, less the time both engines were busy in a
round is what everything else adds: the round loop, both gRPC streams, detokenisation, the HTTP
answer and its proxy. The router's CPU time is that of its process, with the set-up of the requests
and all that Ray runs in it; the same is measured while nothing is asked of it.

    python benchmarks/round_overhead.py [--target FOLDER --draft FOLDER] [--runs 9] [--json FILE]
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from report import machine, table

from specdec_ray.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec_ray.serve import build_app

APP = "specdec"
ALLOWED_MS, ALLOWED_CPU_MS = 2.0, 1.5
IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Run:
    """One measured load, per round and in milliseconds.

    Attributes:
        streams: generations at once.
        added_ms: median gap between chunks less engine time; defined for one stream only.
        router_cpu_ms: CPU time of the router's process.
    """

    streams: int
    rounds: int
    engines_ms: float
    added_ms: float | None
    router_cpu_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=BUNDLED_TARGET)
    parser.add_argument("--draft", default=BUNDLED_DRAFT)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(machine(threads=1))
    with _service(arguments.target, arguments.draft) as url:
        _load(url, 1, arguments.tokens)  # warm
        idle = _idle_cpu_ms_per_s()
        runs = [
            _measured(url, streams, arguments.tokens)
            for _ in range(arguments.runs)
            for streams in (1, 8)
        ]
    _report(runs)
    print(f"router CPU while idle: {idle:.0f} ms a second")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=1))


@contextmanager
def _service(target: str, draft: str) -> Iterator[str]:
    """A service on its own Ray cluster; yields its URL."""
    port = _free_port()
    os.environ["RAY_SERVE_LOG_TO_STDERR"] = "0"
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as scratch:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=scratch,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {
            "target": {"model": target, "served_name": "bench", "dtype": "float32"},
            "draft": {"model": draft, "dtype": "float32"},
            "router": {"grpc_port": 0},
        }
        serve.run(build_app(args), name=APP)
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()


def _measured(url: str, streams: int, tokens: int) -> Run:
    router = _process("Router")
    busy, cpu = _busy_s(), _cpu_s(router)
    arrivals = _load(url, streams, tokens)
    busy, cpu = _busy_s() - busy, _cpu_s(router) - cpu
    rounds = len(arrivals) - streams  # a stream's first chunk comes from its prefill
    gap = statistics.median(b - a for a, b in itertools.pairwise(arrivals))
    return Run(
        streams=streams,
        rounds=rounds,
        engines_ms=1e3 * busy / rounds,
        added_ms=1e3 * (gap - busy / rounds) if streams == 1 else None,
        router_cpu_ms=1e3 * cpu / rounds,
    )


def _idle_cpu_ms_per_s() -> float:
    """What the router's process takes while nothing is asked of it."""
    router = _process("Router")
    before = _cpu_s(router)
    time.sleep(IDLE_S)
    return 1e3 * (_cpu_s(router) - before) / IDLE_S


def _load(url: str, streams: int, tokens: int) -> list[float]:
    """Run that many choices of one streamed request; when each chunk came, in seconds."""
    body: dict[str, Any] = {
        "prompt": "The standard library",
        "max_tokens": tokens,
        "n": streams,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        return [time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")]


def _busy_s() -> float:
    handles = (serve.get_deployment_handle(name, APP) for name in ("Target", "Draft"))
    return sum(float(handle.statistics.remote().result()["busy_s"]) for handle in handles)


def _process(deployment: str) -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        if f"ServeReplica:{APP}:{deployment}" in " ".join(process.info["cmdline"] or []):
            return process
    raise RuntimeError(f"no process of {deployment}")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _report(runs: list[Run]) -> None:
    single = [run for run in runs if run.streams == 1]
    several = [run for run in runs if run.streams > 1]
    added = statistics.median(run.added_ms for run in single if run.added_ms is not None)
    rows = [
        ["engines, one stream", _median(single, "engines_ms"), ""],
        ["added, one stream", f"{added:.2f}", f"<= {ALLOWED_MS}"],
        ["router CPU, one stream", _median(single, "router_cpu_ms"), f"<= {ALLOWED_CPU_MS}"],
        ["router CPU, 8 streams", _median(several, "router_cpu_ms"), f"<= {ALLOWED_CPU_MS}"],
    ]
    print(table(["per round, median of runs", "ms", "asked"], rows))


def _median(runs: list[Run], name: str) -> str:
    return f"{statistics.median(getattr(run, name) for run in runs):.2f}"


if __name__ == "__main__":
    main()
