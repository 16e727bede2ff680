from pathlib import Path

import pytest

from specdec_ray.cli import main

LOCAL = Path(__file__).parents[1] / "deploy" / "local.yaml"


@pytest.fixture
def pair(make_llama, tokenizer, tmp_path):
    for name, options in {"target": {}, "draft": {"noise": 0.05}}.items():
        make_llama(**options).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]


def test_generate_prints_text_and_acceptance(pair, capsys):
    assert main(["generate", "hello", *pair, "--max-tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("hello")
    assert "acceptance" in out
    assert "tokens a round" in out


def test_generate_without_a_draft(pair, capsys):
    assert main(["generate", "hello", *pair[:2], "--method", "none", "--max-tokens", "5"]) == 0
    assert "nothing was drafted" in capsys.readouterr().out


def test_what_is_wrong_is_one_line(pair, capsys):
    assert main(["generate", "hello", *pair, "--top-p", "0"]) == 1
    assert "top_p" in capsys.readouterr().err
    assert main(["generate", "x", "--target", "/no/such/model"]) == 1
    assert "/no/such/model" in capsys.readouterr().err


def test_asking_no_one_is_one_line(capsys):
    assert main(["ask", "hello", "--address", "127.0.0.1:1"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_check_config(tmp_path, capsys):
    assert main(["check-config", str(LOCAL)]) == 0
    assert "specdec-demo" in capsys.readouterr().out
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(LOCAL.read_text().replace("draft_tokens", "draft_tokns"))
    assert main(["check-config", str(wrong)]) == 1
    assert "speculation.draft_tokns" in capsys.readouterr().err
    wrong.write_text("a: 1")
    assert main(["check-config", str(wrong)]) == 1
