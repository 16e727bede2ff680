"""The command, on a tiny model, to heads that the service loads and that draft better for it."""

import json

import pytest
import torch

from specdec_ray.cli import main
from specdec_ray.decoder import SpeculativeDecoder

TEXT = "the cat sat on the mat and the dog sat on the cat. " * 60


@pytest.fixture
def target(tmp_path, make_llama, tokenizer):
    """A model that knows the text by heart."""
    model = make_llama()
    ids = torch.tensor([tokenizer(TEXT[:255])["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def train(target, text, out, steps):
    options = f"--target {target} --out {out} --steps {steps}"
    options += " --length 64 --heads 2 --learning-rate 0.01"
    return main(["train-medusa", str(text), *options.split()])


def generated(target, heads):
    medusa = {"heads": str(heads)}
    with SpeculativeDecoder.from_pretrained(str(target), method="medusa", medusa=medusa) as decoder:
        return decoder.generate(TEXT[:60], max_tokens=60)


def test_trained_heads_draft_better_and_the_text_stays(target, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    lines = [json.dumps({"text": TEXT[:500]})] * 4
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    assert train(target, tmp_path / "text.jsonl", tmp_path / "short", 1) == 0
    assert train(target, tmp_path / "text.txt", tmp_path / "heads", 40) == 0
    assert train(target, tmp_path / "text.txt", tmp_path / "heads", 60) == 0  # goes on
    state = json.loads(
        (tmp_path / "heads" / "checkpoints" / "checkpoint-60" / "trainer_state.json").read_text()
    )
    assert [entry["step"] for entry in state["log_history"]][:2] == [2, 4]
    poor, good = (generated(target, tmp_path / name) for name in ("short", "heads"))
    with SpeculativeDecoder.from_pretrained(str(target)) as decoder:
        plain = decoder.generate(TEXT[:60], max_tokens=60)
    assert poor.token_ids == good.token_ids == plain.token_ids
    accepted = [sum(one.stats.per_round_accepted) for one in (poor, good)]
    assert accepted[1] > 25 > accepted[0]


def test_text_that_cannot_be_read_is_named(target, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"role": 1}\n')
    assert train(target, tmp_path / "bad.jsonl", tmp_path / "heads", 1) == 1
    assert "bad.jsonl, line 2" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("short")
    assert train(target, tmp_path / "short.txt", tmp_path / "heads", 1) == 1
    assert "5 tokens, a window needs 64" in capsys.readouterr().err
