"""A peer behind a line protocol, run by the peer's own Python; imports nothing of the project.

    python worker.py llamacpp | transformers

Reads one JSON command a line, answers `{"ok": ...}` or `{"error": "..."}` on a line of stdout.
What libraries print goes to stderr. Both kinds know `load` and

  {"op": "generate", "tokens": [...], "n": n, "mode": "plain" | "lookup" | "draft", "k": k}
      greedy new tokens past any end-of-sequence, and the seconds at which each one was there

and llama.cpp also `step`, `prefill`, `tokenize` and `logits` (for benchmarks of single passes).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

np: Any = None  # of the peer's environment


class LlamaCpp:
    """llama.cpp through llama-cpp-python. Passes and proposals are llama.cpp's; the greedy loop
    is here, because the binding's own computes and copies the logits of every prompt token
    as soon as it speculates."""

    CHUNK = 512

    def load(
        self, model: str, threads: int, n_ctx: int, draft: str | None = None, ngram: int = 2
    ) -> dict[str, Any]:
        global np
        np = importlib.import_module("numpy")
        self.lib = importlib.import_module("llama_cpp")
        options = {
            "n_ctx": n_ctx, "n_batch": self.CHUNK, "n_ubatch": self.CHUNK, "n_threads": threads,
            "n_threads_batch": threads, "verbose": False,
        }  # fmt: skip
        self.target = self.lib.Llama(model, **options)
        self.draft: Any = None if draft is None else self.lib.Llama(draft, **options)
        if self.draft is not None and self.draft.n_vocab() != self.target.n_vocab():
            raise ValueError("the draft's vocabulary is not the target's")
        speculative = importlib.import_module("llama_cpp.llama_speculative")
        self.lookup = speculative.LlamaPromptLookupDecoding.find_candidate_pred_tokens
        self.ngram = ngram
        self.rng = np.random.default_rng(0)
        self.filled = 0
        self.drafted: list[int] = []  # what the draft's cache holds
        return {
            "version": self.lib.__version__,
            "system": self.lib.llama_print_system_info().decode(),
            "modes": ["plain", "lookup"] + ([] if draft is None else ["draft"]),
        }

    def decode(self, model: Any, tokens: Sequence[int], past: int, every: bool) -> float:
        """Seconds of one pass; the cache is cut back to `past` entries first."""
        model._ctx.kv_cache_seq_rm(-1, past, -1)
        model._batch.set_batch(batch=tokens, n_past=past, logits_all=every)
        begin = time.perf_counter()
        model._ctx.decode(model._batch)
        self.lib.llama_synchronize(model._ctx.ctx)
        return time.perf_counter() - begin

    def feed(self, model: Any, tokens: Sequence[int], past: int) -> None:
        """Cache entries of many tokens; logits of the last."""
        for at in range(0, len(tokens), self.CHUNK):
            self.decode(model, tokens[at : at + self.CHUNK], past + at, False)

    def choices(self, model: Any, rows: int) -> list[int]:
        """The most probable token behind each of the last pass's rows."""
        n = model.n_vocab()
        rows_V = (
            np.ctypeslib.as_array(model._ctx.get_logits_ith(i - rows), (n,)) for i in range(rows)
        )
        return [int(row.argmax()) for row in rows_V]

    def propose(self, mode: str, ids: list[int], k: int) -> list[int]:
        if mode == "lookup":
            found = self.lookup(np.asarray(ids, np.intc), self.ngram, k)
            return [int(t) for t in found]
        if mode != "draft" or self.draft is None:
            return []
        same = 0
        while same < min(len(self.drafted), len(ids) - 1) and self.drafted[same] == ids[same]:
            same += 1
        self.feed(self.draft, ids[same:], same)
        self.drafted = list(ids)
        out = self.choices(self.draft, 1)
        while len(out) < k:
            self.decode(self.draft, out[-1:], len(self.drafted), False)
            self.drafted.append(out[-1])
            out += self.choices(self.draft, 1)
        return out

    def generate(self, tokens: list[int], n: int, mode: str, k: int) -> dict[str, Any]:
        self.filled = 0
        self.drafted = []
        ids, times = list(tokens), []
        rounds = drafted = accepted = 0
        begin = time.perf_counter()
        self.feed(self.target, ids, 0)
        ids += self.choices(self.target, 1)
        times.append(time.perf_counter() - begin)
        while len(times) < n:
            room = min(k, n - len(times) - 1)
            proposal = self.propose(mode, ids, room) if room > 0 and mode != "plain" else []
            proposal = proposal[:room]
            self.decode(self.target, [ids[-1], *proposal], len(ids) - 1, True)
            said = self.choices(self.target, len(proposal) + 1)
            good = 0
            while good < len(proposal) and proposal[good] == said[good]:
                good += 1
            ids += said[: good + 1]
            times += [time.perf_counter() - begin] * (good + 1)
            rounds, drafted, accepted = rounds + 1, drafted + len(proposal), accepted + good
        return {
            "tokens": ids[len(tokens) :], "times": times, "rounds": rounds, "drafted": drafted,
            "accepted": accepted,
        }  # fmt: skip

    def some(self, n: int) -> list[int]:
        return [int(t) for t in self.rng.integers(100, 1000, n)]

    def step(self, rows: int, context: int) -> float:
        """Seconds of one pass over `rows` rows after `context` positions."""
        if self.filled != context:
            self.feed(self.target, self.some(context), 0)
            self.filled = context
        return self.decode(self.target, self.some(rows), context, True)

    def prefill(self, tokens: int) -> float:
        """Seconds to process so many tokens from nothing, in one pass."""
        self.filled = 0
        return self.decode(self.target, self.some(tokens), 0, False)

    def tokenize(self, text: str) -> list[int]:
        ids = self.target.tokenize(text.encode(), add_bos=False, special=False)
        return [int(i) for i in ids]

    def logits(self, tokens: list[int], file: str) -> bool:
        """Write the float32 logits of every token as .npy."""
        self.filled, rows = 0, []
        for at in range(0, len(tokens), self.CHUNK):
            part = tokens[at : at + self.CHUNK]
            self.decode(self.target, part, at, True)
            n = self.target.n_vocab()
            rows += [
                np.array(np.ctypeslib.as_array(self.target._ctx.get_logits_ith(i), (n,)))
                for i in range(len(part))
            ]
        np.save(file, np.stack(rows).astype(np.float32))
        return True


class Transformers:
    """transformers' generate: plain, assisted by a draft model, prompt lookup."""

    def load(
        self,
        model: str,
        threads: int,
        dtype: str,
        draft: str | None = None,
        ngram: int = 2,
        device: str = "cpu",
    ) -> dict[str, Any]:
        self.torch = torch = importlib.import_module("torch")
        self.lib = importlib.import_module("transformers")
        self.lib.utils.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.device, self.ngram = device, ngram
        self.target = self.open(model, dtype)
        self.draft: Any = None if draft is None else self.open(draft, dtype)
        self.rows = self.calls = 0
        self.target.register_forward_pre_hook(self.count, with_kwargs=True)
        return {
            "version": f"{self.lib.__version__}, torch {torch.__version__}",
            "weight_bytes": sum(p.numel() * p.element_size() for p in self.target.parameters()),
            "modes": ["plain", "lookup"] + ([] if draft is None else ["draft"]),
        }

    def open(self, path: str, dtype: str) -> Any:
        folder = path
        options: dict[str, Any] = {}
        if path.endswith(".gguf"):
            folder, name = os.path.split(path)
            options = {"gguf_file": name}
            if hasattr(self.lib, "GgufConfig"):  # versions that may keep blocks packed
                options["quantization_config"] = self.lib.GgufConfig(dequantize=True)
        model = self.lib.AutoModelForCausalLM.from_pretrained(
            folder or ".", dtype=getattr(self.torch, dtype), local_files_only=True, **options
        )
        model.to(self.device).eval()
        # Greedy, and past any end-of-sequence.
        model.generation_config = self.lib.GenerationConfig(do_sample=False, pad_token_id=0)
        return model

    def count(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.calls, self.rows = self.calls + 1, self.rows + int(rows.shape[1])

    def generate(self, tokens: list[int], n: int, mode: str, k: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if mode == "lookup":
            options = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": self.ngram}
        elif mode == "draft":
            config = self.draft.generation_config
            config.num_assistant_tokens = k
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            options = {"assistant_model": self.draft}
        clock = _Clock()
        ids = self.torch.tensor([tokens], device=self.device)
        self.rows = self.calls = 0
        with self.torch.inference_mode():
            clock.begin = time.perf_counter()
            out = self.target.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=n, streamer=clock,
                **options,
            )  # fmt: skip
        new = [int(t) for t in out[0, len(tokens) :]]
        times = [t for t, count in clock.puts for _ in range(count)][: len(new)]
        times += [clock.puts[-1][0]] * (len(new) - len(times))
        # The first pass is prefill (with a proposal behind the prompt, where it speculates).
        drafted = self.rows - len(tokens) - (self.calls - 1)
        return {
            "tokens": new, "times": times, "rounds": self.calls, "drafted": drafted,
            "accepted": len(new) - self.calls,
        }  # fmt: skip


class _Clock:
    """A streamer of generate that notes when tokens come; the first put is the prompt."""

    begin = 0.0

    def __init__(self) -> None:
        self.puts: list[tuple[float, int]] = []
        self.prompt = True

    def put(self, value: Any) -> None:
        if self.prompt:
            self.prompt = False
        else:
            self.puts.append((time.perf_counter() - self.begin, int(value.numel())))

    def end(self) -> None:
        pass


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print what they like; stdout is the protocol's
    peer: Any = {"llamacpp": LlamaCpp, "transformers": Transformers}[sys.argv[1]]()
    for line in sys.stdin:
        command = json.loads(line)
        method: Callable[..., Any] = getattr(peer, command.pop("op"))
        try:
            answer = {"ok": method(**command)}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
