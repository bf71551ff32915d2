"""Servers by URL: tokens are counted, not chunks, and odd servers are named, not believed."""

from __future__ import annotations

import dataclasses

import pytest
from fake_server import Behaviour, fields_of, serving

from paceline.bench.peers import PeerError, PeerPrompt, Server
from paceline.bench.peers.compare import rest, token_gaps
from paceline.bench.peers.prometheus import Page, speculation

PROMPT = PeerPrompt(id="a", tokens=(5, 6, 7), text="one two", turns=("one two",))


def run(behaviour: Behaviour, **options: str):
    with serving(behaviour) as url:
        server = Server(url, **options)
        return server.info, server.generate("served", PROMPT, 8)


def test_tokens_of_a_burst_are_counted_by_running_usage() -> None:
    info, got = run(Behaviour())
    assert (got.n_tokens, got.counted) == (8, "stream-usage")
    assert len(set(got.arrivals)) == 3
    assert rest(got) == 7  # the first arrival brought one
    gaps = token_gaps(got)
    assert len(gaps) == 7
    assert gaps[0] == gaps[1] == gaps[2]  # three tokens share the round's time
    assert gaps[0] < got.arrivals[1] - got.arrivals[0]
    assert got.prompt_tokens == 3
    assert info.model == "fake"
    assert "no /metrics" in info.notes[-1]


def test_logprobs_name_the_tokens_where_chunks_carry_no_usage() -> None:
    behaviour = Behaviour(each_usage=False)
    _, got = run(behaviour)
    assert (got.n_tokens, got.counted) == (8, "logprobs")
    assert behaviour.seen[-1]["logprobs"] == 1


def test_a_total_alone_gives_a_rate_but_no_latency_of_tokens() -> None:
    _, got = run(Behaviour(each_usage=False, logprobs=False))
    assert (got.n_tokens, got.counted) == (8, "usage")
    assert got.arrivals == ()
    assert token_gaps(got) == []
    assert got.seconds > got.first > 0


def test_without_any_count_chunks_are_a_labelled_lower_bound() -> None:
    _, got = run(Behaviour(each_usage=False, usage=False, logprobs=False))
    assert (got.n_tokens, got.counted) == (3, "chunks")


@pytest.mark.parametrize(
    ("refuse", "missing"),
    [
        ({"continuous_usage_stats"}, {"continuous_usage_stats"}),
        ({"ids"}, {"ids"}),
        ({"ignore_eos"}, {"ignore_eos", "continuous_usage_stats"}),
        ({"stream_options", "ignore_eos", "ids"}, {"stream_options", "ignore_eos", "ids"}),
    ],
)
def test_what_a_server_refuses_is_left_out(refuse: set[str], missing: set[str]) -> None:
    behaviour = Behaviour(refuse=frozenset(refuse))
    info, got = run(behaviour)
    assert not fields_of(behaviour.seen[-1]) & missing
    assert got.n_tokens == 8
    notes = " ".join(info.notes)
    assert ("as text" in notes) == ("ids" in refuse)
    assert ("lengths may differ" in notes) == ("ignore_eos" in refuse)


def test_a_server_with_chat_alone_is_asked_by_chat() -> None:
    behaviour = Behaviour(routes=("/v1/chat/completions",))
    info, got = run(behaviour)
    assert got.n_tokens == 8
    assert behaviour.seen[-1]["messages"] == [{"role": "user", "content": "one two"}]
    assert "chat template" in info.notes[0]


def test_counters_that_begin_with_the_first_request() -> None:
    behaviour = Behaviour(counters=True)
    with serving(behaviour) as url:
        server = Server(url, name="peer")
        behaviour.drafts = 0  # as if the probe had not happened: the counters are absent
        told = server.generate("served", PROMPT, 8).speculation
        again = server.generate("served", PROMPT, 8).speculation
    assert server.info.version == "vLLM 9.9"
    assert server.info.name == "peer"
    assert told is not None
    assert (told.rounds, told.drafted, told.accepted) == (3, 12, 5)
    assert told.tau == pytest.approx(1 + 5 / 3)
    assert told.acceptance_rate == pytest.approx(5 / 12)
    assert told.joint == pytest.approx((2 / 3,))
    assert again == told  # the second run's own, not the sum


@pytest.mark.parametrize(
    ("end", "says"),
    [("cut", "broke off"), ("error", "out of memory")],
)
def test_a_stream_that_fails_is_an_error(end: str, says: str) -> None:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        server = Server(url)
        behaviour.end = end
        with pytest.raises(PeerError, match=says):
            server.generate("served", PROMPT, 8)


def test_a_stream_that_ends_without_the_closing_word_is_whole() -> None:
    _, got = run(Behaviour(end="finish"))
    assert got.n_tokens == 8


def test_a_key_is_sent_and_its_absence_named() -> None:
    behaviour = Behaviour(key="secret")
    with serving(behaviour) as url, pytest.raises(PeerError, match="--peer-key-env"):
        Server(url)
    _, got = run(dataclasses.replace(behaviour, seen=[]), key="secret")
    assert got.n_tokens == 8


def test_addresses_that_lead_nowhere() -> None:
    with pytest.raises(PeerError, match="can't be reached"):
        Server("http://127.0.0.1:9", timeout=5)
    with pytest.raises(PeerError, match="no address"):
        Server("localhost:8000")
    with serving(Behaviour(models={"data": []})) as url:
        with pytest.raises(PeerError, match="--peer-model"):
            Server(url)
        assert Server(f"{url}/v1", model="named").info.model == "named"
    with serving(Behaviour(routes=())) as url, pytest.raises(PeerError, match="404"):
        Server(url)


def test_pages_of_other_servers() -> None:
    old = Page.parse("llamacpp:tokens_drafted_total 10\nllamacpp:tokens_drafted_accepted_total 4\n")
    told = speculation(Page(), old)
    assert told is not None
    assert (told.rounds, told.drafted, told.accepted, told.tau) == (None, 10, 4, None)
    gauge = Page.parse(
        'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:spec_accept_rate{tp_rank="0"} 0.4\n'
    )
    told = speculation(Page(), gauge)
    assert told is not None
    assert (told.tau, told.acceptance_rate, told.source) == (2.5, 0.4, "gauge of SGLang")
    idle = Page.parse("sglang:spec_accept_length 0.0\nsglang:spec_accept_rate 0.0\n")
    assert speculation(Page(), idle) is None
    assert speculation(Page(), Page()) is None


def test_a_restarted_counter_counts_from_zero() -> None:
    names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    page = {
        n: Page.parse("".join(f"vllm:spec_decode_{name}_total {n}\n" for name in names))
        for n in (5, 50)
    }
    told = speculation(page[50], page[5])
    assert told is not None
    assert told.drafted == 5


def test_exposition_format() -> None:
    page = Page.parse(
        "# TYPE a counter\n"
        'a_total{x="q\\"uo,te",position="1"} 1.5e1 1700000000000\n'
        'a_total{position="1",x="other"} 2\n'
        "b NaN\nb{} 3\nnot a line at all {\nc one\n"
    )
    assert page.total("a") == 17.0
    assert page.by_position("a") == {1: 17.0}
    assert page.total("b") == 3.0
    assert page.total("c") is None
    assert page.software is None
