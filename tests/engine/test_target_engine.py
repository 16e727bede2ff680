import threading
import time
from dataclasses import replace
from queue import Queue

import pytest
import torch

from specdec_ray.engine.loop import EngineThread
from specdec_ray.engine.messages import (
    Close,
    Open,
    Opened,
    Propose,
    RefusalCode,
    Refused,
    Verdict,
    Verify,
)
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.shape import Budget
from specdec_ray.speculation.tree import ROOT, TokenTree

PROMPT = list(b"What is speculation?")
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def reference(make_llama, greedy_reference):
    return greedy_reference(make_llama(), PROMPT, 40)


@pytest.fixture
def target(make_llama, make_target, drive):
    return drive(make_target(make_llama()))


@pytest.mark.parametrize("right", range(5))
def test_a_round_accepts_what_is_right_and_adds_one(target, reference, right):
    """Scripted proposals: `right` of four tokens agree with the target."""
    opened = target.open(PROMPT)
    assert opened.emitted == (reference[0],)
    assert opened.handle.length == len(PROMPT)
    handle, done, round_number = opened.handle, 1, 0
    while done < 30:
        drafted = reference[done : done + 4]
        drafted[right:] = [(token + 1) % 250 for token in drafted[right:]]
        round_number += 1
        verdict = target.verify(handle, round_number, len(PROMPT) + done, drafted)
        assert verdict.accepted == right
        assert list(verdict.emitted) == reference[done : done + right + 1]
        done += right + 1
        assert verdict.handle.length == len(PROMPT) + done - 1
        handle = verdict.handle


def test_no_proposal_is_plain_decoding(target, reference):
    opened = target.open(PROMPT)
    tokens = list(opened.emitted)
    for round_number in range(1, 10):
        verdict = target.verify(opened.handle, round_number, len(PROMPT) + len(tokens))
        tokens += verdict.emitted
    assert tokens == reference[:10]


def test_a_tree_follows_the_branch_that_is_right(target, reference):
    opened = target.open(PROMPT)
    _, a, b, c = reference[:4]
    tree = TokenTree((a + 1, a, b + 1, b, c), (ROOT, ROOT, 1, 1, 3))
    verdict = target.verify(opened.handle, 1, len(PROMPT) + 1, tree)
    assert verdict.emitted == tuple(reference[1:5])
    after = target.verify(verdict.handle, 2, len(PROMPT) + 5, reference[5:8])
    assert after.emitted == tuple(reference[5:9])


def test_verify_is_idempotent(target, reference):
    params = SamplingParams(seed=3)
    opened = target.open(PROMPT, params=params)
    first = target.verify(opened.handle, 1, len(PROMPT) + 1, [1, 2])
    again = target.verify(opened.handle, 1, len(PROMPT) + 1, [1, 2])
    assert again == first


REFUSALS = {
    "round ahead": ({"round_number": 2}, RefusalCode.STALE_ROUND),
    "length ahead": ({"base_length": 99}, RefusalCode.STALE_LENGTH),
    "length behind": ({"base_length": 1}, RefusalCode.STALE_LENGTH),
    "too many nodes": ({"tokens": [1] * 17}, RefusalCode.INVALID),
    "id beyond the vocabulary": ({"tokens": [259]}, RefusalCode.INVALID),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_what_cannot_be_verified_is_refused_and_changes_nothing(target, reference, case):
    changes, code = REFUSALS[case]
    opened = target.open(PROMPT)
    good = {
        "handle": opened.handle,
        "round_number": 1,
        "base_length": len(PROMPT) + 1,
        "tokens": reference[1:3],
    }
    refused = target.verify(**{**good, **changes})
    assert isinstance(refused, Refused)
    assert refused.code is code
    assert refused.known_length == len(PROMPT) + 1
    assert target.verify(**good).emitted == tuple(reference[1:4])


def test_stale_epoch_is_refused(target):
    opened = target.open(PROMPT)
    refused = target.verify(replace(opened.handle, epoch=1), 1, len(PROMPT) + 1)
    assert refused.code is RefusalCode.STALE_EPOCH


def test_a_proposal_may_not_pass_the_sessions_room(target, reference):
    opened = target.open(PROMPT, room=3)
    refused = target.verify(opened.handle, 1, len(PROMPT) + 1, reference[1:4])
    assert refused.code is RefusalCode.INVALID
    assert "exceed" in refused.message


def test_only_leased_sessions_are_served(target):
    refused = target.open(PROMPT, session_id=b"x" * 16)
    assert refused.code is RefusalCode.UNKNOWN_SESSION
    opened = target.open(PROMPT)
    target.submit(Close(opened.handle.session_id))
    assert target.verify(opened.handle, 1, 21).code is RefusalCode.UNKNOWN_SESSION
    target.submit(Close(opened.handle.session_id))  # twice is no error


def test_bad_contexts_are_refused(target):
    assert target.open([]).code is RefusalCode.INVALID
    assert target.open([300]).code is RefusalCode.INVALID
    assert "never fit" in target.open(PROMPT, room=200 * 16).message


def test_a_target_does_not_propose(target):
    opened = target.open(PROMPT)
    assert target.ask(Propose(opened.handle, (), Budget(3, 3))).code is RefusalCode.INVALID


def test_a_busy_session_takes_no_second_request(target):
    session_id = target.lease()
    opening = Open(session_id, tuple(PROMPT), GREEDY, Rule.COUPLED, 64)
    target.submit(opening)
    target.submit(opening)
    assert target.replies[-1].code is RefusalCode.BUSY
    target.step()
    assert isinstance(target.replies[-1], Opened)


def test_rejection_takes_deterministic_proposals_and_trees(target):
    opened = target.open(PROMPT, params=SamplingParams(), rule=Rule.REJECTION)
    base = len(PROMPT) + 1
    first = target.verify(opened.handle, 1, base, TokenTree((1, 2, 3), (ROOT, ROOT, 1)))
    assert isinstance(first, Verdict)
    base += len(first.emitted)
    q = DraftProbs(torch.tensor([[1, 2]] * 2), torch.tensor([[0.25, 0.75]] * 2))
    tree = TokenTree((1, 2), (ROOT, ROOT))
    assert isinstance(target.verify(first.handle, 2, base, tree, q), Verdict)


def test_block_takes_chains_only(target):
    opened = target.open(PROMPT, params=SamplingParams(), rule=Rule.BLOCK)
    base = len(PROMPT) + 1
    tree = TokenTree((1, 2), (ROOT, ROOT))
    refused = target.verify(opened.handle, 1, base, tree)
    assert refused.code is RefusalCode.INVALID
    assert "chains only" in refused.message
    assert isinstance(target.verify(opened.handle, 1, base, [1, 2]), Verdict)


def test_q_must_be_what_the_nodes_were_drawn_from(target):
    opened = target.open(PROMPT, params=SamplingParams(), rule=Rule.REJECTION)
    base = len(PROMPT) + 1
    q = DraftProbs(torch.tensor([[1, 6]]), torch.tensor([[0.5, 0.5]]))
    assert "for 2 nodes" in target.verify(opened.handle, 1, base, [1, 6], q).message
    q = DraftProbs(torch.tensor([[5, 6]]), torch.tensor([[0.5, 0.5]]))
    assert "not in its own" in target.verify(opened.handle, 1, base, [1], q).message
    q = DraftProbs(torch.tensor([[1, 6]]), torch.tensor([[0.5, torch.nan]]))
    assert "sum to one" in target.verify(opened.handle, 1, base, [1], q).message
    q = DraftProbs(torch.tensor([[1, 600]]), torch.tensor([[0.5, 0.5]]))
    assert "outside" in target.verify(opened.handle, 1, base, [1], q).message
    q = DraftProbs(torch.tensor([[1, 6]]), torch.tensor([[0.5, 0.5]]))
    assert isinstance(target.verify(opened.handle, 1, base, [1], q), Verdict)


def test_prefill_comes_in_chunks_beside_verifies(make_llama, make_target, drive, greedy_reference):
    target = drive(make_target(make_llama(), step_tokens=40))
    opened = target.open(PROMPT)
    long_prompt = (PROMPT * 8)[:150]
    session_id = target.lease()
    target.submit(Open(session_id, tuple(long_prompt), GREEDY, Rule.COUPLED, 200))
    for round_number in range(1, 4):  # each verify is answered by the very next step
        base = len(PROMPT) + round_number
        target.submit(Verify(opened.handle, round_number, base, TokenTree()))
        target.step()
        assert target.replies[-1].round == round_number
    while target.step():
        pass
    assert target.replies[-1].handle.session_id == session_id
    assert list(target.replies[-1].emitted) == greedy_reference(make_llama(), long_prompt, 1)


def test_all_sessions_share_one_forward(target, monkeypatch):
    opened = [target.open(PROMPT[: 5 + i]) for i in range(6)]
    forwards = []
    model = target.engine._model
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda s: forwards.append(len(s)) or plain(s))
    for i, one in enumerate(opened):
        target.submit(Verify(one.handle, 1, 6 + i, TokenTree.chain([1] * i)))
    target.step()
    assert forwards == [6]


def test_sessions_wait_for_blocks_in_order(make_llama, make_target, drive):
    target = drive(make_target(make_llama(), blocks=6))
    first = target.open(PROMPT, room=44)  # four blocks
    second, third = target.lease(), target.lease()
    target.submit(Open(second, tuple(PROMPT), GREEDY, Rule.COUPLED, 64))
    target.submit(Open(third, tuple(PROMPT), GREEDY, Rule.COUPLED, 30))
    while target.step():
        pass
    assert target.engine.sessions.load.waiting == 2
    target.engine.release(third)  # leaving the queue
    assert target.engine.sessions.load.waiting == 1
    target.engine.release(first.handle.session_id)
    while target.step():
        pass
    assert target.replies[-1].handle.session_id == second
    target.engine.release(second)
    assert target.engine.sessions.load.free_blocks == 6


def test_a_failed_step_fails_its_sessions_only(make_llama, make_target, monkeypatch):
    engine = make_target(make_llama())
    thread = EngineThread(engine, "failing")
    session_id = b"0" * 16
    thread.lease(session_id)
    opening = Open(session_id, tuple(PROMPT), GREEDY, Rule.COUPLED, 64)
    opened = _ask(thread, opening)
    with monkeypatch.context() as broken:
        broken.setattr(engine._model, "forward", lambda segments: 1 / 0)
        refused = _ask(thread, Verify(opened.handle, 1, len(PROMPT) + 1, TokenTree()))
    assert refused.code is RefusalCode.FAILED
    assert "ZeroDivisionError" in refused.message
    assert isinstance(_ask(thread, opening), Opened)
    assert thread.unhealthy_reason(60) is None
    thread.release(session_id)


def test_an_engine_whose_steps_all_fail_or_hang_is_unhealthy(make_llama, make_target, monkeypatch):
    engine = make_target(make_llama())
    thread = EngineThread(engine, "hanging")
    monkeypatch.setattr(engine._model, "forward", lambda segments: 1 / 0)
    for number in range(3):
        session_id = bytes([number]) * 16
        thread.lease(session_id)
        _ask(thread, Open(session_id, tuple(PROMPT), GREEDY, Rule.COUPLED, 64))
        thread.release(session_id)
    assert "steps failed" in thread.unhealthy_reason(60)

    engine = make_target(make_llama())
    thread = EngineThread(engine, "hanging")
    go_on = threading.Event()
    monkeypatch.setattr(engine._model, "forward", lambda segments: go_on.wait() and 1 / 0)
    thread.lease(session_id)
    thread.submit(Open(session_id, tuple(PROMPT), GREEDY, Rule.COUPLED, 64), lambda replies: None)
    time.sleep(0.1)
    assert "running for more than" in thread.unhealthy_reason(0.05)
    go_on.set()
    thread.release(session_id)


def _ask(thread, request):
    answers = Queue()
    thread.submit(request, answers.put)
    return answers.get(timeout=5)[0]
