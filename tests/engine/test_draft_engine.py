from dataclasses import replace

import pytest
import torch

from specdec_ray.engine.messages import Opened, Proposal, Propose, RefusalCode, Verify
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget, StaticShape
from specdec_ray.speculation.tree import TokenTree

PROMPT = list(b"The draft proposes")


@pytest.fixture
def draft(make_llama, make_draft, drive):
    return drive(make_draft(make_llama()))


@pytest.fixture
def reference(make_llama, greedy_reference):
    return greedy_reference(make_llama(), PROMPT, 60)


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_right_drafts_stay_right_round_after_round(draft, reference, k):
    """Acceptance of equal weights must be whole: a stale cache shows here and nowhere else."""
    handle, done = draft.open(PROMPT).handle, 0
    while done + k < 60:
        known = handle.length - len(PROMPT)
        proposal = draft.propose(handle, reference[known : done + 1], k)
        assert list(proposal.tree.tokens) == reference[done + 1 : done + 1 + k]
        assert proposal.base_length == len(PROMPT) + done + 1
        handle, done = proposal.handle, done + k + 1


@pytest.mark.parametrize("kept", range(5))
def test_state_after_a_rejection_equals_a_fresh_session(draft, kept):
    handle = draft.open(PROMPT).handle
    first = draft.propose(handle, [65], 4)
    committed = [*first.tree.tokens[:kept], 200]
    continued = draft.propose(first.handle, committed, 4)
    fresh = draft.open([*PROMPT, 65]).handle
    expected = draft.propose(fresh, committed, 4)
    assert continued.tree == expected.tree


def test_catches_up_on_rounds_it_missed(draft, reference):
    handle = draft.open(PROMPT).handle
    proposal = draft.propose(handle, reference[:9], 3)
    assert list(proposal.tree.tokens) == reference[9:12]


def test_tokens_sent_twice_are_taken_once(draft, reference):
    handle = draft.open(PROMPT).handle
    draft.propose(handle, reference[:3], 2)
    again = draft.propose(handle, reference[:5], 2)
    assert list(again.tree.tokens) == reference[5:7]


def test_only_missing_tokens_are_fed(draft, reference, monkeypatch):
    handle = draft.open(PROMPT).handle
    model, fed = draft.engine._model, []
    plain = model.forward
    monkeypatch.setattr(
        model, "forward", lambda s: fed.append([len(x.tokens) for x in s]) or plain(s)
    )
    proposal = draft.propose(handle, reference[:1], 3)
    assert fed == [[1], [1], [1]]
    fed.clear()
    # All accepted: the last drafted token and the bonus are new to the cache.
    draft.propose(proposal.handle, reference[1:5], 2)
    assert fed == [[2], [1]]


def test_sessions_advance_together_and_leave_apart(draft, monkeypatch):
    handles = [draft.open(PROMPT[:n]).handle for n in (3, 9, 12)]
    model, batches = draft.engine._model, []
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda s: batches.append(len(s)) or plain(s))
    for count, handle in enumerate(handles, 1):
        draft.submit(Propose(handle, (65,), Budget(count, count)))
    while draft.step():
        pass
    assert batches == [3, 2, 1]
    together = {r.handle.session_id: r.tree for r in draft.replies if isinstance(r, Proposal)}
    for n, count, handle in zip((3, 9, 12), (1, 2, 3), handles, strict=True):
        alone = draft.propose(draft.open(PROMPT[:n]).handle, [65], count)
        assert together[handle.session_id] == alone.tree


def test_rejection_ships_q_of_every_node(draft):
    params = SamplingParams(seed=1)
    handle = draft.open(PROMPT, params=params, rule=Rule.REJECTION).handle
    proposal = draft.propose(handle, [65], 3)
    assert proposal.draft_probs.ids.shape == (3, 64)
    for node, token in enumerate(proposal.tree.tokens):
        assert token in proposal.draft_probs.ids[node]


def test_what_does_not_fit_is_refused(draft):
    opened = draft.open(PROMPT, room=4)
    assert isinstance(opened, Opened)
    assert opened.emitted == ()
    refused = draft.propose(opened.handle, [1, 2], 3)
    assert refused.code is RefusalCode.INVALID
    assert draft.propose(opened.handle, [1, -3], 1).code is RefusalCode.INVALID
    assert draft.propose(opened.handle, [1], 0).code is RefusalCode.INVALID
    assert isinstance(draft.propose(opened.handle, [1, 2], 2), Proposal)


def test_a_handle_ahead_of_the_state_is_refused_with_the_known_length(draft):
    opened = draft.open(PROMPT)
    ahead = replace(opened.handle, length=opened.handle.length + 5)
    refused = draft.propose(ahead, [1], 1)
    assert refused.code is RefusalCode.STALE_LENGTH
    assert refused.known_length == len(PROMPT)


def test_a_draft_does_not_verify(draft):
    opened = draft.open(PROMPT)
    refused = draft.ask(Verify(opened.handle, 1, 1, TokenTree()))
    assert refused.code is RefusalCode.INVALID


def test_a_position_is_drafted_anew_in_every_round(draft):
    """How a round ended says something about what it drew for the positions beyond, so a later
    round that drafts one of them, here in the same context, must not draw the same again."""
    agreed = 0
    for seed in range(12):
        params = SamplingParams(seed=seed, temperature=20)
        first = draft.open(PROMPT, params=params, rule=Rule.REJECTION)
        tokens = draft.propose(first.handle, [65], 3).tree.tokens
        later = draft.open(PROMPT, params=params, rule=Rule.REJECTION)
        agreed += draft.propose(later.handle, [65, *tokens[:2]], 1).tree.tokens == tokens[2:]
    assert agreed < 4  # one in 64 by chance


@pytest.fixture
def stock(make_llama):
    """Most probable next tokens by the stock model, most probable first."""
    model = make_llama()

    @torch.inference_mode()
    def best(tokens, count):
        return model(torch.tensor([tokens])).logits[0, -1].topk(count).indices.tolist()

    return best


WIDE = StaticShape.branching([3, 2, 2])


@pytest.fixture
def tree_draft(make_llama, make_draft, drive, stock):
    del stock  # made first: the engine's model attends by the engine's own function
    return drive(make_draft(make_llama(seed=0), shape=WIDE))


def tree_below(stock, tokens, widths):
    """The greedy tree of these widths: path -> children."""
    paths, level = set(), [()]
    for width in widths:
        level = [(*p, t) for p in level for t in stock([*tokens, *p], width)]
        paths |= set(level)
    return paths


@pytest.mark.parametrize("kept", range(4))
def test_trees_hold_the_best_children_of_every_node(tree_draft, stock, kept):
    """In the first round, and behind any of its branches: one wrong slot would show."""
    handle, committed = tree_draft.open(PROMPT).handle, [*PROMPT, 65]
    proposal = tree_draft.ask(Propose(handle, (65,), Budget(64, 3)))
    assert set(proposal.tree.paths) == tree_below(stock, committed, [3, 2, 2])
    for path in [path for path in proposal.tree.paths if len(path) == 3][kept::4]:
        tokens = (*path[:kept], 200)
        session = tree_draft.open(PROMPT).handle
        first = tree_draft.ask(Propose(session, (65,), Budget(64, 3)))
        again = tree_draft.ask(Propose(first.handle, tokens, Budget(5, 2)))
        expected = tree_below(stock, [*committed, *tokens], [3, 2])
        assert set(again.tree.paths) <= expected
        assert len(again.tree) == 5


def test_a_level_is_one_step_and_leaves_are_not_fed(tree_draft, monkeypatch):
    handle = tree_draft.open(PROMPT).handle
    model, fed = tree_draft.engine._model, []
    plain = model.forward
    monkeypatch.setattr(
        model, "forward", lambda s: fed.append([len(x.tokens) for x in s]) or plain(s)
    )
    proposal = tree_draft.ask(Propose(handle, (65,), Budget(64, 3)))
    assert len(proposal.tree) == 3 + 6 + 12
    assert fed == [[1], [3], [6]]
    fed.clear()
    deepest = next(path for path in proposal.tree.paths if len(path) == 3)
    tree_draft.ask(Propose(proposal.handle, (*deepest, 9), Budget(3, 1)))
    assert fed == [[2]]  # the leaf and the bonus are new to the cache
