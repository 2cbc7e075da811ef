"""A long day of one process: many varied requests, with what must not change measured throughout.

    python benchmarks/endurance.py MODEL --tokens 100000 --requests 500 [--into DIR] [--commit HASH]

Through the public API (LLM, Conversation): chat turns with regenerated, undone and abandoned ones,
short prompts and prompts of most of the context, answers that their reader drops, and every option
of the sampler. The promises, each with its figures in the result DIR/endurance-NAME.json:

    memory     neither the process nor the device holds more at the end than after the warm-up: the
               medians of the first and the last tenth of all requests, after each of which both are
               read, differ by no more than HOST_BYTES and DEVICE_BYTES
    bits       the same prompts, asked first and last, are answered by equal ids with equal log
               probabilities, and leave logits of equal bits
    finite     no logit and no log probability is NaN or infinite
    speed      of the last thousand tokens within 2 % of the first thousand: greedy answers of one
               short prompt, the median of five runs each, so that depth and sampler are alike

Exits with 1 where one is broken. The warm-up makes what is made once for a kind of request: kernels
of every sampler, and the few graphs that serve prompts of every length.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.measure import RESULTS, about, command, finish, say
from minfer_cuda.bench import about_software
from minfer_cuda.conversation import Conversation
from minfer_cuda.llm import LLM, Completion
from minfer_cuda.runners.cuda_runner import graph_rows

HOST_BYTES = 8 << 20  # of 100,000 tokens: 84 bytes for each, one small object kept
DEVICE_BYTES = 2 << 20  # what a driver's allocation is rounded to
SPEED = 0.02
RUNS = 5
TEXT = (
    "The lock on the canal had been closed since spring, and nobody could say why. Étienne counted "
    "17 barges, wrote the number down twice, and crossed it out; 数は合わなかった. "
    "def gauge(level: float) -> str:\n    return f'{level:.2f} m' if level > 0 else 'dry'\n"
)
QUESTIONS = (
    "Why is the sky blue?",
    "Write a function that reverses a linked list.",
    "Name three rivers.",
    "Was heißt „Schleuse“ auf Englisch?",
    "Explain what a semaphore is, briefly.",
)
# every field of SamplingParams is set by one, and each way through the sampler is taken
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.7, "top_k": 100, "top_p": 0.9, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.8, "repeat_penalty": 1.3, "penalty_window": 256},
    {"temperature": 0.8, "frequency_penalty": 0.4, "presence_penalty": 0.2, "penalty_window": -1},
    {"temperature": 0.0, "repeat_penalty": 1.1},
    {"temperature": 0.9, "logit_bias": {11: 2.0, 13: -5.0, 17: -math.inf}},
    {"temperature": 1.0, "top_k": 5000, "top_p": 0.99, "min_p": 0.0, "presence_penalty": 0.1},
)
LOGPROBS = (0, 0, 1, 8)
STOPS: tuple[tuple[str, ...], ...] = ((), (), (), ("\n\n",), ("the end of all", "zq"))


@dataclass(frozen=True)
class Sample:
    """After a request: tokens so far, bytes of the process and in use on the device."""

    tokens: int
    host: int
    device: int | None


def host_bytes() -> int:
    """Resident memory of this process that no file backs."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def device_bytes() -> int:
    """In use on the current CUDA device, by whomever."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


@dataclass
class Run:
    """The requests so far, and what they did."""

    llm: LLM
    n_tokens: int
    n_requests: int
    device: Callable[[], int] | None
    tokens: int = 0
    requests: int = 0
    not_finite: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(0))
    _turn: int = 0

    def budget(self) -> int:
        """Tokens for the next answer: what is left over the requests that are, more or less."""
        left = max(1, self.n_requests - self.requests)
        mean = max(1.0, (self.n_tokens - self.tokens) / left)
        return max(1, round(mean * self.random.uniform(0.5, 1.5)))

    def options(self) -> dict[str, Any]:
        """Sampler, stops and log probabilities of the next request; all combinations in turn."""
        n, self._turn = self._turn, self._turn + 1
        options = dict(SAMPLERS[n % len(SAMPLERS)])
        bias = dict(options.pop("logit_bias", {}))
        if n % 7:  # else it may end by itself
            bias |= dict.fromkeys(self.llm.tokenizer.end_ids, -math.inf)
        options["logit_bias"] = bias
        options["seed"] = n if n % 3 else None
        return options | {
            "stop": STOPS[n // len(SAMPLERS) % len(STOPS)],
            "n_logprobs": LOGPROBS[n % len(LOGPROBS)],
        }

    def answer(self, kind: str, ids: Sequence[int], most: int | None = None) -> Completion:
        """One request, read to its end, or as far as `most` pieces."""
        room = self.llm.n_ctx - len(ids)
        limit = min(self.budget(), room)
        completion = self.llm.complete(ids, max_tokens=limit, **self.options())
        for n, _ in enumerate(completion, 1):
            if n == most:
                completion.end()
        self.count(kind, completion)
        return completion

    def count(self, kind: str, completion: Completion) -> None:
        """Check and remember what a request has done."""
        self.requests += 1
        self.tokens += len(completion.tokens)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        for token in completion.tokens:
            # an id that is never drawn has a probability of 0
            values = [] if token.logprob is None else [token.logprob]
            values += [p for _, p in token.logprobs]
            self.not_finite += sum(not math.isfinite(p) for p in values)
        self.not_finite += int(np.count_nonzero(~np.isfinite(self.llm.engine.runner.logits())))
        device = self.device() if self.device else None
        self.samples.append(Sample(self.tokens, host_bytes(), device))


# ---- the requests ----


def requests(run: Run) -> Iterator[None]:
    """One request at each step, without end."""
    chat = _conversation(run, None)
    while True:
        kind = run.random.choices(("chat", "short", "long", "dropped"), (5, 3, 2, 1))[0]
        if kind == "chat":
            if len(chat.turns) > 24:
                chat = _conversation(run, run.random.choice((None, "", "Answer in one sentence.")))
            yield from _turns(run, chat)
        else:
            ids = _encoded(run.llm, _prompt(run, long=kind == "long"), run.llm.n_ctx * 3 // 4)
            run.answer(kind, ids, most=5 if kind == "dropped" else None)
            yield


def _conversation(run: Run, system: str | None) -> Conversation:
    llm = run.llm
    return Conversation(
        llm.template, llm.tokenizer, llm.n_ctx, system=system, reserve=llm.n_ctx // 4
    )


def _turns(run: Run, chat: Conversation) -> Iterator[None]:
    """A message and its answer; now and then the answer again, or neither is kept."""
    question = run.random.choice(QUESTIONS)
    ids = chat.begin_turn(f"{question} ({run.requests})")
    completion = run.answer("chat", ids)
    yield
    what = run.random.choice(("keep", "keep", "keep", "regenerate", "rollback", "undo"))
    if what == "rollback":
        chat.rollback()
        run.llm.engine.rollback(len(ids) // 2)
        return
    chat.end_turn(completion.ids, completion.text, completion.finish_reason)
    if what == "regenerate":
        again = run.answer("regenerated", chat.regenerate())
        chat.end_turn(again.ids, again.text, again.finish_reason)
        yield
    elif what == "undo":
        chat.undo()


def _encoded(llm: LLM, text: str, most: int) -> list[int]:
    """The first ids of a text."""
    return llm.tokenizer.encode(text, parse_special=False)[:most]


def _prompt(run: Run, long: bool) -> str:
    n_ctx = run.llm.n_ctx
    n = run.random.randint(n_ctx // 4, n_ctx * 3) if long else run.random.randint(1, 160)
    begin = run.random.randrange(len(TEXT))
    return (TEXT * (2 + n // len(TEXT)))[begin : begin + n]


# ---- the promises ----


def probe(llm: LLM) -> dict[str, str]:
    """Digests of the answers to two prompts, greedy and drawn, and of their last logits."""
    found = {}
    for name, options in (("greedy", {"temperature": 0.0}), ("drawn", {"seed": 7})):
        for length, n in (("short", llm.n_ctx // 64), ("long", llm.n_ctx // 2)):
            ids = _encoded(llm, TEXT * (1 + n // 16), n)
            llm.engine.rollback(0)
            completion = llm.complete(ids, max_tokens=min(64, llm.n_ctx // 4), n_logprobs=4,
                                      **options)  # fmt: skip
            text = "".join(completion)
            digest = hashlib.sha256(repr((completion.tokens, text)).encode())
            digest.update(llm.engine.runner.logits().tobytes())
            found[f"{name} {length}"] = digest.hexdigest()
    return found


def speeds(llm: LLM, n_tokens: int) -> list[float]:
    """Tokens per second of greedy answers of so many tokens, behind one short prompt."""
    never = dict.fromkeys(llm.tokenizer.end_ids, -math.inf)
    ids = _encoded(llm, QUESTIONS[0], llm.n_ctx // 4)
    rates = []
    for _ in range(RUNS):
        llm.engine.rollback(0)
        completion = llm.complete(ids, max_tokens=n_tokens, temperature=0.0, logit_bias=never)
        for _ in completion:
            pass
        rates.append(completion.stats.decode_rate)
    return rates


def graph_lengths(longest: int) -> list[int]:
    """Prompts that between them need every graph of up to `longest` tokens, and that one."""
    of_rows = {graph_rows(n): n for n in range(1, longest + 1)}
    return sorted({*of_rows.values(), longest})


def warm_up(llm: LLM) -> None:
    """What is made once: see above."""
    for options in SAMPLERS:
        for n_logprobs in sorted(set(LOGPROBS)):
            for masked in (False, True):
                bias = dict(options.get("logit_bias", {}))
                bias |= dict.fromkeys(llm.tokenizer.end_ids, -math.inf) if masked else {}
                chosen = options | {"logit_bias": bias, "n_logprobs": n_logprobs}
                for _ in llm.complete([1], max_tokens=min(4, llm.n_ctx), **chosen):
                    pass
    longest = llm.n_ctx * 3 // 4
    long = _encoded(llm, TEXT * (1 + llm.n_ctx // 16), longest)
    for n in graph_lengths(longest):
        for _ in range(2):  # the second makes the graph
            llm.engine.rollback(0)
            for _ in llm.complete(long[:n], max_tokens=1):
                pass


def growth(values: Sequence[int]) -> dict[str, float]:
    """Medians of the first and the last tenth, their difference, and the slope for a request."""
    tenth = max(1, len(values) // 10)
    first, last = statistics.median(values[:tenth]), statistics.median(values[-tenth:])
    slope = float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0
    return {"first": first, "last": last, "growth": last - first, "slope": round(slope, 1)}


def promises(result: dict[str, Any]) -> list[str]:
    """Those that are broken, with their figures."""
    broken = []
    for name, most in (("host", HOST_BYTES), ("device", DEVICE_BYTES)):
        grown = result["memory"][name]
        if grown is not None and grown["growth"] > most:
            broken.append(f"{name} memory grew by {grown['growth']:,.0f} bytes, {most:,} may be")
    for name, first in result["answers"]["first"].items():
        if result["answers"]["last"][name] != first:
            broken.append(f"the {name} answer is another one at the end")
    if result["not_finite"]:
        broken.append(f"{result['not_finite']} values were not finite")
    change = result["speed"]["change"]
    if abs(change) > SPEED:
        broken.append(f"the speed changed by {change:+.1%}, {SPEED:.0%} may be")
    if result["tokens"] < result["asked"]["tokens"]:
        broken.append(f"{result['tokens']} tokens only")
    return broken


def endure(llm: LLM, n_tokens: int, n_requests: int, on_gpu: bool) -> dict[str, Any]:
    """All of it; the result less what the machine and the file are called."""
    start = time.perf_counter()
    thousand = min(1000, llm.n_ctx // 2, max(2, n_tokens // 10))
    run = Run(llm, n_tokens, n_requests, device_bytes if on_gpu else None)
    warm_up(llm)
    speeds(llm, thousand)
    say(f"warm after {time.perf_counter() - start:.1f} s")
    first, first_speeds = probe(llm), speeds(llm, thousand)
    mark = time.perf_counter()
    for _ in requests(run):
        if time.perf_counter() - mark > 10:
            mark = time.perf_counter()
            say(f"{run.requests} requests, {run.tokens} tokens")
        if run.requests >= n_requests and run.tokens >= n_tokens:
            break
    last_speeds, last = speeds(llm, thousand), probe(llm)
    before, after = statistics.median(first_speeds), statistics.median(last_speeds)
    devices = [s.device for s in run.samples if s.device is not None]
    return {
        "kind": "endurance",
        "seconds": round(time.perf_counter() - start, 1),
        "asked": {"tokens": n_tokens, "requests": n_requests},
        "tokens": run.tokens,
        "requests": run.requests,
        "kinds": run.kinds,
        "n_ctx": llm.n_ctx,
        "runs_on": llm.engine.runner.describe(),
        "memory": {
            "host": growth([s.host for s in run.samples]),
            "device": growth(devices) if devices else None,
        },
        "answers": {"first": first, "last": last},
        "not_finite": run.not_finite,
        "speed": {
            "tokens": thousand,
            "first": first_speeds,
            "last": last_speeds,
            "change": after / before - 1,
        },
        "samples": [[s.tokens, s.host, s.device] for s in run.samples],
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=100_000, metavar="N")
    parser.add_argument("--requests", type=int, default=500, metavar="N")
    parser.add_argument("--n-ctx", type=int, default=4096, metavar="N")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--commit", help="of the source tree, where it cannot tell")
    options = parser.parse_args(words)
    on_gpu = options.device != "cpu"
    with LLM(options.model, options.n_ctx, options.device) as llm:
        result = endure(llm, options.tokens, options.requests, on_gpu)
    machine = about() if on_gpu else {"command": command(), **about_software(), "device": "CPU"}
    result = {"file": options.model.name, **machine, **result}
    result["broken"] = promises(result)
    finish(result, options.into / f"endurance-{options.model.stem}.json", options.commit)
    for broken in result["broken"]:
        say(f"broken: {broken}")
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
