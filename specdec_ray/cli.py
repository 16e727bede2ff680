"""The command line: generate locally, ask a running service, check a configuration."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import yaml
from transformers.utils import logging as transformers_logging

from specdec_ray import SpeculativeDecoder
from specdec_ray.config import BUNDLED_DRAFT, BUNDLED_TARGET, Method, TargetConfig, parse_config
from specdec_ray.errors import ConfigError, SpecdecError
from specdec_ray.pb import inference_pb2 as pb
from specdec_ray.pb import inference_pb2_grpc
from specdec_ray.rounds.request import SpeculationStats
from specdec_ray.speculation.proposal import Rule

IMPORT_PATH = "specdec_ray.serve:build_app"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it did what was asked, 1 with one line on stderr if not."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except SpecdecError as error:
        print(f"specdec-ray: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec-ray", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="generate one text in this process")
    generate.set_defaults(run=_generate)
    generate.add_argument("prompt")
    generate.add_argument("--target", default=BUNDLED_TARGET, help="Hugging Face id or folder")
    generate.add_argument("--draft", default=BUNDLED_DRAFT, help="the same")
    generate.add_argument(
        "--method",
        type=Method,
        choices=list(Method),
        default=Method.DRAFT_MODEL,
        help="what proposes tokens; --draft is for draft_model only",
    )
    generate.add_argument("--medusa-heads", help="Hugging Face id or folder; of method medusa")
    generate.add_argument("--exit-layer", type=int, help="of method early_exit")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--draft-tokens", type=int, default=5, help="k of every round")
    generate.add_argument(
        "--rule",
        type=Rule,
        choices=list(Rule),
        default=Rule.COUPLED,
        help="acceptance rule; typical is lossy, the others are exact",
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--seed", type=int, help="names the text; fresh unless given")
    generate.add_argument("--stop", action="append", default=[], help="may be given several times")
    generate.add_argument("--dtype", default="float32")
    generate.add_argument("--device", default="auto")
    generate.add_argument("--threads", type=int, help="torch threads")

    medusa = commands.add_parser("train-medusa", help="train Medusa heads on a frozen target")
    medusa.set_defaults(run=_train_medusa)
    medusa.add_argument("text", type=Path, nargs="+", help="plain text, or chats as .jsonl")
    medusa.add_argument("--target", default=BUNDLED_TARGET, help="Hugging Face id or folder")
    medusa.add_argument("--out", type=Path, required=True, help="folder; a second run goes on")
    medusa.add_argument("--heads", type=int, default=3)
    medusa.add_argument("--steps", type=int, default=300)
    medusa.add_argument("--batch", type=int, default=4, help="windows of a step")
    medusa.add_argument("--length", type=int, default=256, help="tokens of a window")
    medusa.add_argument("--learning-rate", type=float, default=1e-3)

    ask = commands.add_parser("ask", help="stream a text from a running service, over gRPC")
    ask.set_defaults(run=_ask)
    ask.add_argument("prompt")
    ask.add_argument("--address", default="127.0.0.1:9000")
    ask.add_argument("--max-tokens", type=int, default=128)
    ask.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")

    check = commands.add_parser("check-config", help="validate a Serve config file")
    check.set_defaults(run=_check_config)
    check.add_argument("file", type=Path)
    return parser


def _generate(arguments: argparse.Namespace) -> None:
    """Print the text as it comes, then what speculation did for it."""
    transformers_logging.disable_progress_bar()
    with SpeculativeDecoder.from_pretrained(
        arguments.target,
        arguments.draft if arguments.method is Method.DRAFT_MODEL else None,
        method=arguments.method,
        rule=arguments.rule,
        draft_tokens=arguments.draft_tokens,
        medusa=arguments.medusa_heads and {"heads": arguments.medusa_heads},
        early_exit=arguments.exit_layer and {"layer": arguments.exit_layer},
        threads=arguments.threads,
        dtype=arguments.dtype,
        device=arguments.device,
    ) as decoder:
        started, count, stats = time.monotonic(), 0, None
        deltas = decoder.stream(
            arguments.prompt,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            seed=arguments.seed,
            stop=arguments.stop,
        )
        print(arguments.prompt, end="", flush=True)
        for delta in deltas:
            print(delta.text, end="", flush=True)
            count += len(delta.token_ids)
            stats = delta.stats
        seconds = time.monotonic() - started
    assert stats is not None, "the last delta carries them"
    print(
        f"\n\n{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s; {_summary(stats)}"
    )


def _train_medusa(arguments: argparse.Namespace) -> None:
    try:
        from specdec_ray.training.medusa import MedusaTraining, train_medusa
    except ImportError as error:
        raise ConfigError(f"training needs specdec-ray[train]: {error}") from error
    train_medusa(
        MedusaTraining(
            TargetConfig(model=arguments.target).source,
            tuple(arguments.text),
            arguments.out,
            heads=arguments.heads,
            steps=arguments.steps,
            batch=arguments.batch,
            length=arguments.length,
            learning_rate=arguments.learning_rate,
        )
    )


def _ask(arguments: argparse.Namespace) -> None:
    """Print the text as it comes, then the seed that names it and the acceptance."""
    given = pb.GenerationInput(
        text=arguments.prompt,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        echo=True,
    )
    with grpc.insecure_channel(arguments.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            for message in stub.GenerateStream(pb.GenerateStreamRequest(input=given)):
                print(message.delta.text, end="", flush=True)
        except grpc.RpcError as error:
            raise SpecdecError(f"{error.code().name}: {error.details()}") from error
    end = message.end
    rate = end.speculation.draft_acceptance_rate
    print(f"\n\n{end.usage.completion_tokens} tokens, seed {end.seed}, acceptance {rate:.0%}")


def _summary(stats: SpeculationStats) -> str:
    rounds = len(stats.per_round_proposed)
    if not rounds:
        return "nothing was drafted"
    accepted, proposed = sum(stats.per_round_accepted), sum(stats.per_round_proposed)
    return (
        f"acceptance {accepted}/{proposed} = {accepted / proposed:.0%}, "
        f"{1 + accepted / rounds:.2f} tokens a round over {rounds} rounds"
    )


def _check_config(arguments: argparse.Namespace) -> None:
    """Check each application of ours in the file; Serve itself ignores unknown keys."""
    try:
        content = yaml.safe_load(arguments.file.read_text())
        applications = content["applications"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{arguments.file}: no Serve config: {error}") from error
    ours = [one for one in applications if one.get("import_path") == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"{arguments.file}: no application has import_path {IMPORT_PATH}")
    for application in ours:
        config = parse_config(application.get("args") or {})
        print(f"{application.get('name', 'default')}: {config.model_dump_json(indent=2)}")
