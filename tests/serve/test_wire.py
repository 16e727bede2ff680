import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_ray.engine import messages as m
from specdec_ray.errors import InvalidParameter
from specdec_ray.pb import rounds_pb2 as pb
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.serve import wire
from specdec_ray.serve.wire import (
    WireLimits,
    check_frame,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    session_of_reply,
    session_of_request,
    split_frames,
)
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.shape import Budget
from specdec_ray.speculation.tree import ROOT, TokenTree

LIMITS = WireLimits(max_context_tokens=100, max_nodes=8, max_support=4)
IDS = st.integers(0, 2**32 - 1)
U32 = IDS
SESSION = st.binary(min_size=16, max_size=16)
HANDLES = st.builds(
    m.CacheHandle, SESSION, st.text(max_size=20), st.integers(0, 2**64 - 1), U32, U32
)
TOKENS = st.lists(IDS, max_size=9).map(tuple)
CHAINS = st.lists(IDS, max_size=8).map(TokenTree.chain)
TREES = CHAINS | st.just(TokenTree((1, 2, 3), (ROOT, ROOT, 1)))
PARAMS = st.builds(
    SamplingParams,
    st.floats(0, 100),
    st.integers(0, 2**31 - 1),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 100),
)
NODES = st.integers(1, 8)
REQUESTS = (
    st.builds(m.Open, SESSION, TOKENS, PARAMS, st.sampled_from(list(Rule)), U32)
    | st.builds(m.Propose, HANDLES, TOKENS, st.builds(Budget, NODES, NODES))
    | st.builds(m.Verify, HANDLES, U32, U32, TREES)
    | st.builds(
        m.Verify, HANDLES, U32, U32, st.just(TokenTree()), own=st.builds(Budget, NODES, NODES)
    )
    | st.builds(m.Close, SESSION)
)
REPLIES = (
    st.builds(m.Opened, HANDLES, TOKENS)
    | st.builds(m.Proposal, HANDLES, U32, TREES)
    | st.builds(
        lambda handle, number, more, tokens, load: m.Verdict(
            handle, number, min(len(tokens) - 1 + more, 8), len(tokens) - 1, tokens, load
        ),
        HANDLES,
        U32,
        st.integers(0, 8),
        TOKENS.filter(len),
        st.builds(m.Load, U32, U32),
    )
    | st.builds(
        m.Refused,
        SESSION,
        st.sampled_from(list(m.RefusalCode)),
        st.text(max_size=50),
        U32,
        st.floats(0, 1000),
    )
)


def fields(message):
    return {name: getattr(message, name) for name in message.__slots__}


@given(REQUESTS)
def test_requests_come_back_as_they_were(request):
    wire = pb.EngineRequest.FromString(encode_request(request).SerializeToString())
    decoded = decode_request(wire, LIMITS)
    assert type(decoded) is type(request)
    assert fields(decoded) == fields(request)
    handle = getattr(request, "handle", request)
    assert session_of_request(wire) == handle.session_id


@given(REPLIES)
def test_replies_come_back_as_they_were(reply):
    wire = pb.EngineReply.FromString(encode_reply(reply).SerializeToString())
    decoded = decode_reply(wire, LIMITS)
    assert fields(decoded) == fields(reply)
    handle = getattr(reply, "handle", reply)
    assert session_of_reply(wire) == handle.session_id


def test_q_is_shipped_bit_by_bit():
    probs = DraftProbs(torch.tensor([[3, 1], [7, 2]]), torch.tensor([[0.1, 0.9], [1 / 3, 2 / 3]]))
    handle = m.CacheHandle(b"s" * 16, "r", 1, 0, 5)
    verify = m.Verify(handle, 1, 6, TokenTree.chain((3, 7)), probs)
    decoded = decode_request(encode_request(verify), LIMITS)
    assert torch.equal(decoded.draft_probs.ids, probs.ids)
    assert torch.equal(decoded.draft_probs.probs, probs.probs)


def test_a_round_is_small():
    handle = m.CacheHandle(b"s" * 16, "Target#abcdefgh", 1_796_000_000_000_000_000, 0, 1500)
    verify = m.Verify(handle, 200, 1501, TokenTree.chain((30_000,) * 5))
    propose = m.Propose(handle, (30_000,) * 5, Budget(60, 5))
    assert len(encode_request(verify).SerializeToString()) < 100
    assert len(encode_request(propose).SerializeToString()) < 100


SESSION_ID = b"s" * 16
HANDLE = pb.CacheHandle(session_id=SESSION_ID)
GOOD_SAMPLING = pb.Sampling(temperature=1, top_p=1)


def propose(**budget):
    asked = pb.Propose(handle=HANDLE, budget=pb.Budget(**budget))
    return pb.EngineRequest(propose=asked)


HOSTILE = {
    "nothing": (pb.EngineRequest(), "request"),
    "short session id": (pb.EngineRequest(close=pb.Close(session_id=b"x")), "session_id"),
    "long context": (
        pb.EngineRequest(open=pb.Open(session_id=SESSION_ID, tokens=[1] * 101)),
        "tokens",
    ),
    "no sampling": (pb.EngineRequest(open=pb.Open(session_id=SESSION_ID, rule=1)), "top_p"),
    "no rule": (
        pb.EngineRequest(open=pb.Open(session_id=SESSION_ID, sampling=GOOD_SAMPLING)),
        "rule",
    ),
    "budget nodes": (propose(nodes=9, depth=1), "budget.nodes"),
    "budget depth": (propose(nodes=1, depth=9), "budget.depth"),
    "no nodes": (propose(nodes=0, depth=1), "budget.nodes"),
    "no budget": (propose(), "budget.nodes"),
    "no budget of its own": (
        pb.EngineRequest(verify=pb.Verify(handle=HANDLE, own=pb.Budget())),
        "budget.nodes",
    ),
    "nodes": (
        pb.EngineRequest(verify=pb.Verify(handle=HANDLE, tree=pb.TokenTree(tokens=[1] * 9))),
        "tree",
    ),
    "parents": (
        pb.EngineRequest(
            verify=pb.Verify(handle=HANDLE, tree=pb.TokenTree(tokens=[1, 2], parents=[0, 9]))
        ),
        "parents",
    ),
    "more parents than nodes allowed": (
        pb.EngineRequest(
            verify=pb.Verify(handle=HANDLE, tree=pb.TokenTree(tokens=[1], parents=[0] * 9))
        ),
        "tree.parents",
    ),
    "parents of no node": (
        pb.EngineRequest(verify=pb.Verify(handle=HANDLE, tree=pb.TokenTree(parents=[0]))),
        "parents",
    ),
    "long replica id": (
        pb.EngineRequest(
            propose=pb.Propose(handle=pb.CacheHandle(session_id=SESSION_ID, replica_id="r" * 1025))
        ),
        "replica_id",
    ),
    "q of no width": (
        pb.EngineRequest(verify=pb.Verify(handle=HANDLE, draft_probs=pb.DraftProbs())),
        "width",
    ),
    "q too wide": (
        pb.EngineRequest(
            verify=pb.Verify(
                handle=HANDLE,
                tree=pb.TokenTree(tokens=[1]),
                draft_probs=pb.DraftProbs(width=2**31, ids=[1], probs=[1]),
            )
        ),
        "width",
    ),
    "q too short": (
        pb.EngineRequest(
            verify=pb.Verify(
                handle=HANDLE,
                tree=pb.TokenTree(tokens=[1]),
                draft_probs=pb.DraftProbs(width=4, ids=[1], probs=[1]),
            )
        ),
        "draft_probs",
    ),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_hostile_messages_are_refused(case):
    message, named = HOSTILE[case]
    with pytest.raises(InvalidParameter, match=named):
        decode_request(message, LIMITS)


def refused(**fields):
    return pb.EngineReply(refused=pb.Refused(session_id=SESSION_ID, code=6, **fields))


def verdict(accepted, emitted, proposed=8):
    fields = {"proposed": proposed, "accepted": accepted, "emitted": emitted}
    return pb.EngineReply(verdict=pb.Verdict(handle=HANDLE, **fields))


HOSTILE_REPLIES = {
    "nothing": (pb.EngineReply(), "reply"),
    "no code": (pb.EngineReply(refused=pb.Refused(session_id=SESSION_ID)), "code"),
    "a code of the future": (
        pb.EngineReply(refused=pb.Refused(session_id=SESSION_ID, code=99)),
        "code",
    ),
    "long message": (refused(message="x" * 1025), "message"),
    "retry never": (refused(retry_after_s=math.inf), "retry_after_s"),
    "retry nan": (refused(retry_after_s=math.nan), "retry_after_s"),
    "retry in the past": (refused(retry_after_s=-1.0), "retry_after_s"),
    "verdict without a token": (verdict(0, []), "emitted"),
    "verdict that accepts more than it emits": (verdict(2, [1, 2]), "emitted"),
    "verdict that emits more than it accepts": (verdict(0, [1, 2]), "emitted"),
    "verdict that accepts more than was proposed": (verdict(1, [1, 2], proposed=0), "proposed"),
    "verdict on more than may be proposed": (verdict(1, [1, 2], proposed=9), "proposed"),
    "long verdict": (verdict(9, [1] * 10), "emitted"),
    "long opening": (pb.EngineReply(opened=pb.Opened(handle=HANDLE, emitted=[1] * 10)), "emitted"),
    "nodes": (
        pb.EngineReply(proposal=pb.Proposal(handle=HANDLE, tree=pb.TokenTree(tokens=[1] * 9))),
        "tree",
    ),
}


@pytest.mark.parametrize("case", list(HOSTILE_REPLIES))
def test_hostile_replies_are_refused(case):
    message, named = HOSTILE_REPLIES[case]
    with pytest.raises(InvalidParameter, match=named):
        decode_reply(message, LIMITS)


@pytest.mark.parametrize("nodes", [0, 8])
def test_any_number_of_nodes_up_to_the_limit_is_legal(nodes):
    handle = m.CacheHandle(SESSION_ID, "r", 1, 0, 5)
    for draft_probs in (None, DraftProbs(torch.zeros(nodes, 4).long(), torch.zeros(nodes, 4))):
        verify = m.Verify(handle, 1, 6, TokenTree.chain((3,) * nodes), draft_probs)
        decoded = decode_request(encode_request(verify), LIMITS)
        assert decoded.tree == verify.tree
        assert draft_probs is None or decoded.draft_probs.ids.shape == (nodes, 4)


def test_a_refusal_says_no_more_than_a_peer_takes():
    reply = m.Refused(SESSION_ID, m.RefusalCode.FAILED, "x" * 5000)
    assert decode_reply(encode_reply(reply), LIMITS).message == "x" * wire.MAX_TEXT_CHARS


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 5), st.integers(1, 600))
def test_frames_hold_every_message_in_order_within_the_limits(sizes, max_messages, max_bytes):
    limits = WireLimits(100, max_messages_per_frame=max_messages)
    messages = [encode_request(m.Open(SESSION_ID, (n,) * n, *OPENING)) for n in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_FRAME_BYTES", max_bytes)
        batches = list(split_frames(messages, limits))
    assert [message for batch in batches for message in batch] == messages
    for batch in batches:
        check_frame(batch, limits)
        assert len(batch) == 1 or pb.RoundsRequest(requests=batch).ByteSize() <= max_bytes


OPENING = (SamplingParams(), Rule.COUPLED, 100)


def test_frames_are_as_few_as_the_count_allows():
    messages = [encode_request(m.Close(SESSION_ID))] * 9
    limits = WireLimits(100, max_messages_per_frame=4)
    assert [len(batch) for batch in split_frames(messages, limits)] == [4, 4, 1]
    with pytest.raises(InvalidParameter, match="frame"):
        check_frame(messages, limits)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_reply_or_refused(data):
    try:
        message = pb.EngineReply.FromString(data)
    except Exception:
        return
    with contextlib.suppress(InvalidParameter):
        decode_reply(message, LIMITS)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_decoded(data):
    try:
        message = pb.EngineRequest.FromString(data)
    except Exception:
        return  # not protobuf: gRPC ends the stream
    with contextlib.suppress(InvalidParameter):
        decode_request(message, LIMITS)
