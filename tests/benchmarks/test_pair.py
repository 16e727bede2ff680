"""The maker of benchmark pairs: what it promises holds in what it wrote."""

from pathlib import Path

import pytest
import torch
from pair import FIRST_WORD, PairInfo, Size, make_pair
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

SIZES = {"target": Size(256, 3), "draft": Size(128, 1), "vocab": 512}


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def rollout(pair: PairInfo, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's greedy texts from new prompts, and the draft's argmax at each of their tokens:
    int64 [8, count] each."""
    prompts = torch.randint(FIRST_WORD, 512, (8, 6), generator=torch.Generator().manual_seed(99))
    texts = load(pair.target).generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=count
    )
    drafted = load(pair.draft)(texts).logits.argmax(-1)
    return texts[:, 6:], drafted[:, 5:-1]


def test_agreement_is_the_one_asked_for(tiny_pair: PairInfo) -> None:
    texts, drafted = rollout(tiny_pair, 64)
    assert tiny_pair.figures.agreement == pytest.approx(0.7, abs=0.06)
    assert (texts == drafted).float().mean().item() == pytest.approx(0.7, abs=0.1)


def test_texts_neither_loop_nor_end(tiny_pair: PairInfo) -> None:
    texts, _ = rollout(tiny_pair, 64)
    assert texts.shape == (8, 64)
    assert texts.min() >= FIRST_WORD
    assert tiny_pair.figures.distinct > 0.9


def test_full_agreement_makes_the_target_write_what_the_draft_would(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, agreement=1.0, **SIZES)
    texts, drafted = rollout(pair, 64)
    assert (texts == drafted).float().mean().item() > 0.97


def test_equal_arguments_give_equal_weights(tiny_pair: PairInfo, tmp_path: Path) -> None:
    again = make_pair(tmp_path, agreement=0.7, **SIZES)
    assert again.figures == tiny_pair.figures
    for folder in ("target", "draft"):
        mine, other = getattr(tiny_pair, folder), getattr(again, folder)
        weights = "model.safetensors"
        assert (mine / weights).read_bytes() == (other / weights).read_bytes()


def test_a_pair_is_made_once(tiny_pair: PairInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr("pair._make", refuse)
    assert make_pair(tiny_pair.target.parents[1], agreement=0.7, **SIZES) == tiny_pair
    with pytest.raises(AssertionError, match="made again"):
        make_pair(tiny_pair.target.parents[1], agreement=0.6, **SIZES)


def test_any_text_can_be_a_prompt(tiny_pair: PairInfo) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.draft)
    assert len(tokenizer) == 512
    assert tokenizer.decode(tokenizer("naïve 東京\n")["input_ids"]) == "naïve 東京\n"
    words = [tokenizer.decode([token]) for token in range(FIRST_WORD, 512)]
    assert len(set(words)) == len(words)
    assert all(word.isascii() and word[0] == " " for word in words)


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (Size(128, 2), Size(128, 2), "does not contain"),
        (Size(256, 1), Size(128, 2), "does not contain"),
        (Size(192, 2), Size(128, 2), "no multiple of 128"),
    ],
)
def test_impossible_sizes_are_refused(
    tmp_path: Path, target: Size, draft: Size, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_pair(tmp_path, target=target, draft=draft, vocab=512)
