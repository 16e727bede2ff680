"""A draft whose tokenizer is another one: the text stays the target's, and drafts are accepted."""

import json
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from specdec_ray import SpeculativeDecoder
from specdec_ray.bundled import DRAFT, TARGET
from specdec_ray.engine.bridge import BridgedDraft
from specdec_ray.engine.messages import Close, Opened, Proposal, Propose, RefusalCode
from specdec_ray.errors import UnsupportedModel
from specdec_ray.models.translation import TokenizerPair
from specdec_ray.sampling.structure import json_schema
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget

PROMPT = "def parse(text: str) -> list[str]:\n"
INDEPENDENT = [Rule.REJECTION, Rule.BLOCK]
PARAMS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 3},
    "edited": {
        "temperature": 0.6,
        "seed": 3,
        "frequency_penalty": 0.4,
        "logit_bias": ((300, 1.0),),
    },
    "grammar": {"grammar": json_schema({"type": "array", "items": {"type": "integer"}})},
}


@pytest.fixture(scope="module")
def relabelled(tmp_path_factory):
    """The bundled draft with its ids turned round."""
    return _turned(tmp_path_factory.mktemp("relabelled"), merges=None)


@pytest.fixture(scope="module")
def coarse(tmp_path_factory):
    """The same with half of its merges, so that it cuts a text in other places."""
    return _turned(tmp_path_factory.mktemp("coarse"), merges=1900)


def _turned(folder, merges):
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype="float32")
    for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        weight.data = weight.data.flip(0)
    last = model.config.vocab_size - 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DRAFT).save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {t: last - i for t, i in content["model"]["vocab"].items()}
    content["model"]["merges"] = content["model"]["merges"][:merges]
    for added in content["added_tokens"]:
        added["id"] = last - added["id"]
    path.write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def plain():
    with SpeculativeDecoder.from_pretrained(str(TARGET), None, dtype="float32") as decoder:
        yield decoder


@pytest.mark.parametrize(
    ("rule", "params"),
    [(Rule.COUPLED, name) for name in PARAMS] + [(rule, "greedy") for rule in INDEPENDENT],
)
def test_speculation_changes_no_token(coarse, plain, params, rule, caplog):
    prompts = [PROMPT, "The naïve 漢字 of 🙂", "x" * 90]
    options = {"max_tokens": 50, "ignore_eos": True, **PARAMS[params]}
    expected = [plain.generate(prompt, **options).token_ids for prompt in prompts]
    with SpeculativeDecoder.from_pretrained(
        str(TARGET), coarse, dtype="float32", rule=rule
    ) as bridged:
        generations = bridged.generate(prompts, **options)
    assert [each.token_ids for each in generations] == expected
    assert sum(sum(each.stats.per_round_accepted) for each in generations) > 0
    assert "token id 0 is '<s>' for the target" in caplog.text


def test_acceptance_is_that_of_the_draft_without_a_bridge(relabelled):
    """The translation loses nothing where both cut a text alike."""
    accepted = []
    for draft in (str(DRAFT), relabelled):
        with SpeculativeDecoder.from_pretrained(str(TARGET), draft, dtype="float32") as decoder:
            generations = decoder.generate([PROMPT, "A list is", "The json module"], max_tokens=80)
        accepted.append(sum(sum(each.stats.per_round_accepted) for each in generations))
    assert accepted[1] >= 0.9 * accepted[0] > 0


@pytest.fixture
def bridge(make_llama, make_draft, tokenizer, drive):
    words = AutoTokenizer.from_pretrained(TARGET)
    return drive(BridgedDraft(make_draft(make_llama()), TokenizerPair(words, tokenizer)))


@pytest.fixture
def ids():
    words = AutoTokenizer.from_pretrained(TARGET)
    return lambda text: words.encode(text, add_special_tokens=False)


def test_lengths_are_counted_in_the_targets_tokens(bridge, ids):
    opened = bridge.open(ids("A list is"))
    assert isinstance(opened, Opened)
    assert opened.handle.length == len(ids("A list is"))
    proposal = bridge.propose(opened.handle, ids(" a"), 4)
    assert isinstance(proposal, Proposal)
    assert proposal.base_length == proposal.handle.length == len(ids("A list is a"))
    assert len(proposal.tree) <= 4
    ahead = replace(proposal.handle, length=99)
    refused = bridge.propose(ahead, ids(" b"), 4)
    assert (refused.code, refused.known_length) == (RefusalCode.STALE_LENGTH, proposal.base_length)


def test_refusals_of_the_draft_come_through(bridge, ids):
    handle = bridge.open(ids("A list")).handle
    bridge.submit(Propose(handle, tuple(ids(" is")), Budget(2, 2)))
    assert bridge.propose(handle, ids(" is"), 2).base_length == len(ids("A list is"))
    assert bridge.replies[-2].code is RefusalCode.BUSY
    assert bridge.verify(handle, 1, 1, [1]).code is RefusalCode.INVALID
    bridge.submit(Close(handle.session_id))
    assert bridge.propose(handle, ids(" is"), 2).code is RefusalCode.UNKNOWN_SESSION
    assert len(bridge.engine.sessions) == 0
    assert not bridge.engine._bridged


def test_a_lost_step_is_a_lost_session(bridge, ids):
    handle = bridge.open(ids("A list")).handle
    bridge.submit(Propose(handle, tuple(ids(" is")), Budget(2, 2)))
    bridge.engine.fail_pending(bridge._outbox, RuntimeError("out of memory"))
    bridge._outbox.flush()
    assert bridge.replies[-1].code is RefusalCode.FAILED
    assert bridge.propose(handle, ids(" is"), 2).code is RefusalCode.UNKNOWN_SESSION
    opened = bridge.open(ids("A list is"), session_id=handle.session_id)
    assert isinstance(bridge.propose(opened.handle, ids(" a"), 2), Proposal)


def test_nothing_is_proposed_without_room(bridge, ids):
    """A context that is full, in the draft's tokens, ends the drafting and not the session."""
    handle = bridge.open(ids("A list is"), room=2).handle
    for text in (" a", " list", " of", " strings", " and", " so", " on"):
        proposal = bridge.propose(handle, ids(text), 4)
        handle = proposal.handle
    assert len(proposal.tree) == 0


def test_what_cannot_be_bridged_is_refused_with_the_first_token_that_differs(
    relabelled, monkeypatch
):
    monkeypatch.setattr(TokenizersBackend, "is_fast", False)
    with pytest.raises(UnsupportedModel, match=r"token id 0 is '<s>' .* no fast backend"):
        SpeculativeDecoder.from_pretrained(str(TARGET), relabelled, dtype="float32")
