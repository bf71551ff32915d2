"""`LLM` on real weights: batches, streams, threads, asyncio, refusals."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from paceline import LLM, EngineConfig, FinishReason, SamplingParams, UserError

PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm(smollm_path: Path) -> LLM:
    return LLM("smollm2-135m", draft="ngram", engine=EngineConfig(kv_tokens=2048))


@pytest.fixture(scope="module")
def expected(llm: LLM) -> str:
    return llm.generate("The capital of France is", PARAMS)[0].text


def test_prompts_may_be_text_tokens_or_many(llm: LLM, expected: str) -> None:
    tokens = llm.tokens("The capital of France is")
    outputs = llm.generate(["Hello", "The capital of France is"], PARAMS)
    assert [o.text for o in outputs][1] == expected
    assert llm.generate(list(tokens), PARAMS)[0].text == expected
    assert len(llm.generate("Hi", SamplingParams(max_tokens=3, n=3, temperature=1.0))) == 3


def test_streams_may_interleave(llm: LLM, expected: str) -> None:
    a = llm.stream("The capital of France is", PARAMS)
    b = llm.stream("Hello", PARAMS)
    first = next(a).text
    next(b)
    whole = llm.generate("The capital of France is", PARAMS)[0].text
    rest = "".join(step.text for step in a)
    b.close()
    assert first + rest == whole == expected
    assert llm.engine.idle
    assert llm.engine.usage()["kv_blocks_used"] == llm.engine.usage()["kv_blocks_cached"]


def test_a_stream_that_nobody_reads_leaves_nothing_behind(llm: LLM) -> None:
    llm.stream("Hello", PARAMS)
    assert llm.engine.idle
    with pytest.raises(UserError, match="empty"):
        llm.stream("", PARAMS)


def test_threads_share_one_batch(llm: LLM, expected: str) -> None:
    texts: list[str] = []

    def work() -> None:
        texts.append(llm.generate("The capital of France is", PARAMS)[0].text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert texts == [expected] * 4


def test_async_streams_run_together_and_cancel_cleanly(llm: LLM, expected: str) -> None:
    async def collect() -> str:
        return "".join(
            [step.text async for step in llm.astream("The capital of France is", PARAMS)]
        )

    async def abandon() -> None:
        stream = llm.astream("Hello", SamplingParams(max_tokens=500, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()

    async def main() -> list[str]:
        results = await asyncio.gather(collect(), abandon(), collect())
        return [r for r in results if r is not None]

    assert asyncio.run(main()) == [expected, expected]
    assert llm.engine.idle


def test_abort_frees_the_blocks_at_once(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(max_tokens=500, ignore_eos=True))
    request = next(stream).request_id
    output = llm.engine.abort(request)
    assert output is not None
    assert output.finish_reason is FinishReason.ABORTED
    assert llm.engine.usage()["kv_blocks_used"] == llm.engine.usage()["kv_blocks_cached"]
    assert llm.engine.abort(request) is None
    stream.close()
    with pytest.raises(UserError, match="no request"):
        llm.engine.abort(request)


def test_one_bad_prompt_refuses_all_before_any_work(llm: LLM) -> None:
    with pytest.raises(UserError, match="empty"):
        llm.generate(["fine", []], PARAMS)
    assert llm.engine.idle


def test_usage_is_readable_before_any_traffic(smollm_path: Path) -> None:
    usage = LLM("smollm2-135m", engine=EngineConfig(kv_tokens=64)).engine.usage()
    assert usage["tau"] == 0.0
    assert usage["target_calls_per_token"] == 0.0


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"model": "smollm"}, "smollm2-135m"),
        ({"draft": "no/such/folder/x.gguf"}, "x.gguf"),
        ({"dtype": "int3"}, "int3"),
        ({"device": "tpu"}, "tpu"),
        ({"k": -1}, "k = -1"),
        ({"policy": "brave"}, "adaptive or fixed"),
        ({"draft": "ngram+none"}, "ngram"),
        ({"profile": "missing.json"}, "missing.json"),
        ({"memory_limit": 10**8}, "available"),
    ],
)
def test_mistakes_are_refused_in_one_line(smollm_path: Path, kwargs: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as e:
        LLM(**{"model": "smollm2-135m", **kwargs})
    assert "\n" not in str(e.value)
