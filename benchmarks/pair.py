"""A benchmark pair: a random Llama and a much slower one that agrees with it at a chosen rate.

Speed depends on the acceptance rate and on the price of a forward, not on what the weights know, so
nothing is downloaded. The target's residual stream is [the draft's dimensions | its own]:

- The first part runs the draft's own weights; nothing else writes it.
- The second part gathers what all other units make of the first. Nothing but lm_head reads it, and
  it is written WHISPER times smaller, so that RMSNorm, which sees both, sees the first part alone.
- lm_head adds them up, the second part times `gain`. At gain 0 the target's greedy token is the
  draft's, at the full price of the target; the larger the gain, the rarer they agree.

Only lm_head depends on the gain, so the hidden states of a text are computed once and a step of the
bisection costs an argmax.

Attention is sharp and blocks write as much as the stream holds, so that greedy texts do not fall
into loops. Only made-up words are emitted: no end token and no byte, hence no broken UTF-8.
"""

import argparse
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

CACHE = Path(__file__).resolve().parent.parent / "build" / "bench-pair"

HEAD_DIM = 64
FIRST_WORD = 258  # ids below are the 256 bytes and two special tokens
WHISPER = 2.0**-8  # a power of two, so that scaling by it rounds nothing

# Deviation of what a projection makes of inputs of deviation 1; 1 where not named.
LOUDNESS = {"q_proj": 1.8, "k_proj": 1.8, "o_proj": 1.4, "down_proj": 2.0, "lm_head": 5.0}
WRITES_STREAM = ("o_proj", "down_proj")

# Agreement is measured on so many texts, each a random prompt and its greedy continuation.
TEXTS, PROMPT, NEW = 16, 8, 48


@dataclass(frozen=True, slots=True)
class Size:
    """Width, a multiple of 128, and depth of a Llama."""

    hidden: int
    layers: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From HIDDENxLAYERS."""
        hidden, layers = text.split("x")
        return cls(int(hidden), int(layers))

    def __str__(self) -> str:
        return f"{self.hidden}x{self.layers}"


TARGET, DRAFT = Size(1024, 8), Size(128, 2)


@dataclass(frozen=True, slots=True)
class PairFigures:
    """What came out.

    Attributes:
        agreement: share of the target's greedy tokens that are the draft's argmax too.
        distinct: share of three-token runs in these texts that occur once; 1 without loops.
        gain: see the module.
    """

    agreement: float
    distinct: float
    gain: float
    target_parameters: int
    draft_parameters: int


@dataclass(frozen=True, slots=True)
class PairInfo:
    """A pair on disk: folders in Hugging Face's layout, bfloat16 weights."""

    target: Path
    draft: Path
    figures: PairFigures


def make_pair(
    out: Path = CACHE,
    *,
    agreement: float = 0.8,
    target: Size = TARGET,
    draft: Size = DRAFT,
    vocab: int = 4096,
    seed: int = 0,
) -> PairInfo:
    """The pair with these arguments, from the folder below `out` named after them, or made there.

    Raises:
        ValueError: a width is no multiple of 128, or the target cannot contain the draft.
    """
    if target.hidden <= draft.hidden or target.layers < draft.layers:
        raise ValueError(f"a target of {target} does not contain a draft of {draft}")
    folder = out / f"agree{agreement:g}-target{target}-draft{draft}-vocab{vocab}-seed{seed}"
    if not folder.is_dir():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        _make(partial, agreement, target, draft, vocab, seed)
        partial.rename(folder)
    figures = PairFigures(**json.loads((folder / "pair.json").read_text()))
    return PairInfo(folder / "target", folder / "draft", figures)


@torch.inference_mode()
def _make(folder: Path, agreement: float, target: Size, draft: Size, vocab: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    small, large = _llama(draft, vocab), _llama(target, vocab)
    _fill_draft(small, random)
    _fill_target(large, small, random)
    own_head = large.lm_head.weight[:, draft.hidden :].float()

    texts = torch.randint(FIRST_WORD, vocab, (TEXTS, PROMPT + NEW), generator=random)
    for _ in range(2):  # random tokens first, then what the target writes at about that gain
        gain = _gain(agreement, large, small, own_head, texts)
        large.lm_head.weight[:, draft.hidden :] = gain * own_head
        texts = _write(large, torch.randint(FIRST_WORD, vocab, (TEXTS, PROMPT), generator=random))

    equal = large(texts).logits.argmax(-1) == small(texts).logits.argmax(-1)
    figures = PairFigures(
        agreement=round(equal[:, PROMPT - 1 : -1].float().mean().item(), 4),
        distinct=round(_distinct(texts[:, PROMPT:].tolist()), 4),
        gain=gain,
        target_parameters=large.num_parameters(),
        draft_parameters=small.num_parameters(),
    )
    tokenizer = _tokenizer(vocab)
    for name, model in ("target", large), ("draft", small):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "pair.json").write_text(json.dumps(asdict(figures), indent=1) + "\n")


def _llama(size: Size, vocab: int) -> LlamaForCausalLM:
    if size.hidden % (2 * HEAD_DIM):
        raise ValueError(f"width {size.hidden} is no multiple of {2 * HEAD_DIM}")
    heads = size.hidden // HEAD_DIM
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=5 * size.hidden // 2,
        head_dim=HEAD_DIM,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _fill_draft(model: LlamaForCausalLM, random: torch.Generator) -> None:
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            kind = _kind(name)
            fan_in = 1 if kind == "embed_tokens" else weight.shape[1]
            weight.normal_(0, LOUDNESS.get(kind, 1.0) / math.sqrt(fan_in), generator=random)


def _fill_target(model: LlamaForCausalLM, draft: LlamaForCausalLM, random: torch.Generator) -> None:
    d, width = draft.config.hidden_size, model.config.hidden_size
    copied = dict(draft.named_parameters())
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.fill_(math.sqrt(d / width))  # RMSNorm divides by the mean over all the width
            continue
        kind = _kind(name)
        loudness = LOUDNESS.get(kind, 1.0)
        weight.zero_()
        if kind == "embed_tokens":
            weight[:, d:].normal_(0, WHISPER, generator=random)
        elif kind == "lm_head":
            std = loudness / WHISPER / math.sqrt(width - d)
            weight[:, d:].normal_(0, std, generator=random)
        elif kind in WRITES_STREAM:
            std = WHISPER * loudness / math.sqrt(weight.shape[1])
            weight[d:].normal_(0, std, generator=random)
        else:
            weight[:, :d].normal_(0, loudness / math.sqrt(d), generator=random)
        if (block := copied.get(name)) is not None:
            weight[: block.shape[0], : block.shape[1]] = block
    for head in model.lm_head, draft.lm_head:
        head.weight[:FIRST_WORD] = 0


def _kind(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.split(".")[-2]


def _gain(
    agreement: float,
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    own_head: torch.Tensor,
    texts: torch.Tensor,
) -> float:
    """The gain at which that share of the texts' next tokens agrees, by bisection."""
    d = draft.config.hidden_size
    hidden = target.model(texts[:, PROMPT:]).last_hidden_state.float()
    shared = hidden[..., :d] @ target.lm_head.weight[:, :d].float().T
    own = hidden[..., d:] @ own_head.T
    wanted = draft(texts[:, PROMPT:]).logits.argmax(-1)
    low, high = 0.0, 4.0
    for _ in range(12):
        gain = (low + high) / 2
        agreed = (shared + gain * own).argmax(-1) == wanted
        if agreed.float().mean() > agreement:
            low = gain
        else:
            high = gain
    return (low + high) / 2


def _write(target: LlamaForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """Prompts and their greedy continuations, int64 [TEXTS, PROMPT + NEW]."""
    texts: torch.Tensor = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW,
        do_sample=False,
    )
    return texts


def _distinct(texts: list[list[int]]) -> float:
    runs = [
        (index, *text[at : at + 3])
        for index, text in enumerate(texts)
        for at in range(len(text) - 2)
    ]
    return len(set(runs)) / len(runs)


def _tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Reads text byte by byte; the ids from FIRST_WORD on are words that only decoding knows."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    tokens += [f"Ġ{_word(index)}" for index in range(vocab - len(tokens))]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def _word(index: int) -> str:
    """The index in syllables: 0 is ba, 1 is be."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    rest, last = divmod(index, len(syllables))
    return (_word(rest - 1) if rest else "") + syllables[last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=CACHE, help="pairs are folders in here")
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--target", type=Size.parse, default=TARGET, metavar="HIDDENxLAYERS")
    parser.add_argument("--draft", type=Size.parse, default=DRAFT, metavar="HIDDENxLAYERS")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    pair = make_pair(**vars(parser.parse_args()))
    print(f"target  {pair.target}\ndraft   {pair.draft}")
    for name, value in asdict(pair.figures).items():
        print(f"{name:17s} {value}")


if __name__ == "__main__":
    main()
