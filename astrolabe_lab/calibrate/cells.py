"""What is measured: bursts of probes, and what their answers say about the engine's steps.

A decode cell keeps a batch decoding and times its steps. A mixed cell keeps a few streams decoding as witnesses and
sends prompts in between: the witnesses' tokens tell how long the steps took that computed them, with nothing of HTTP,
tokenizer or queue in it. A prefill cell times first tokens on an idle engine, which is what a client sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astrolabe_lab.calibrate.probe import Answer, Probe
from astrolabe_lab.calibrate.step_ends import step_ends

STEPS = 24  # decode steps that a window should span


@dataclass(frozen=True, slots=True)
class Steps:
    """``times`` steps of one kind in a window; the counts are those of ``StepCost.step_seconds``."""

    mixed: bool
    new_tokens: float
    sequences: float
    context_tokens: float
    attention: float
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Observation:
    """A window of ``seconds`` in which exactly these steps ran; ``burst`` and ``cell`` it comes from."""

    seconds: float
    steps: tuple[Steps, ...]
    cell: object
    burst: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """On an idle engine a prompt of ``prompt_tokens`` had its first token after ``seconds``."""

    prompt_tokens: int
    seconds: float
    burst: int


@dataclass(frozen=True, slots=True)
class Rough:
    """What steps take, roughly: enough to time a burst. Seconds; ``room``: prompt tokens a step."""

    decode_s: float
    stream_s: float
    chunk_s: float
    token_s: float
    room: int

    def decoding(self, sequences: int) -> float:
        return self.decode_s + self.stream_s * sequences

    def prefill(self, tokens: int) -> float:
        return -(-tokens // self.room) * self.chunk_s + tokens * self.token_s


@dataclass(frozen=True, slots=True)
class Decode:
    """``batch`` streams on prompts of ``prompt_tokens``, decoding together for ``STEPS`` steps or more."""

    batch: int
    prompt_tokens: int

    def output_tokens(self, room: int) -> int:
        """Enough for all to decode together although the first started earlier."""
        early = -(-self.batch * self.prompt_tokens // max(1, room - self.batch))
        return STEPS + 4 + early

    def probes(self, rough: Rough) -> list[Probe]:
        return [Probe(self.prompt_tokens, self.output_tokens(rough.room))] * self.batch

    def expected_s(self, rough: Rough) -> float:
        steps = self.output_tokens(rough.room)
        return rough.prefill(self.batch * self.prompt_tokens) + steps * rough.decoding(self.batch)

    def read(self, answers: list[Answer], burst: int, room: int) -> list[Observation]:
        begin, over = max(a.first_s for a in answers), min(a.last_s for a in answers)
        numbers, ends, shifts = step_ends(answers, begin, over)
        if len(numbers) <= STEPS // 2:
            return []
        steps = int(numbers[-1] - numbers[0])
        # The step that brings token t of a stream has prompt + t - 2 of its tokens before it.
        middle = (numbers[0] + 1 + numbers[-1]) / 2
        context = float(np.sum(self.prompt_tokens + middle + shifts - 2))
        counted = Steps(False, self.batch, self.batch, context, 0.0, steps)
        return [Observation(float(ends[-1] - ends[0]), (counted,), self, burst)]


@dataclass(frozen=True, slots=True)
class Mixed:
    """``witnesses`` streams on ``prompt_tokens`` decode while prompts of ``sizes`` tokens come one by one."""

    witnesses: int
    prompt_tokens: int
    sizes: tuple[int, ...]

    def _starts(self, rough: Rough) -> tuple[list[float], float]:
        """When each prompt is sent, and when the burst is over."""
        step = rough.decoding(self.witnesses)
        at = 1.5 * rough.prefill(self.witnesses * self.prompt_tokens) + 6 * step
        starts = []
        for size in self.sizes:
            starts.append(at)
            at += 1.3 * rough.prefill(size) + 7 * step
        return starts, at

    def output_tokens(self, rough: Rough) -> int:
        _, over = self._starts(rough)
        return int(1.1 * over / rough.decoding(self.witnesses)) + 8

    def probes(self, rough: Rough) -> list[Probe]:
        starts, _ = self._starts(rough)
        witness = Probe(self.prompt_tokens, self.output_tokens(rough))
        return [witness] * self.witnesses + [Probe(n, 1, at) for n, at in zip(self.sizes, starts, strict=True)]

    def expected_s(self, rough: Rough) -> float:
        return 1.15 * self._starts(rough)[1]

    def read(self, answers: list[Answer], burst: int, room: int) -> list[Observation]:
        watching, sent = answers[: self.witnesses], answers[self.witnesses :]
        ready = max(a.first_s for a in watching)
        over = min(a.last_s for a in watching)
        stepping = step_ends(watching, ready, over)
        found, before = [], ready
        for at, answer in enumerate(sent):
            if not len(answer.times) or not len(stepping[0]):
                continue
            after = min(over, sent[at + 1].sent_s if at + 1 < len(sent) else over)
            if before <= answer.sent_s and answer.first_s <= after:
                found += self._window(stepping, answer, before, after, burst, room)
            before = answer.first_s
        return found

    def _window(self, stepping, answer, before, after, burst, room) -> list[Observation]:
        """From the last step that ended before the prompt was sent to the second one after its first token."""
        numbers, ends, shifts = stepping
        first = np.searchsorted(ends, answer.sent_s) - 1
        last = np.searchsorted(ends, answer.first_s) + 1
        if first < 0 or last >= len(ends) or ends[first] < before or ends[last] > after:
            return []
        n, d = answer.probe.prompt_tokens, self.witnesses
        chunks = list(chunked(n, room - d))
        plain = int(numbers[last] - numbers[first]) - len(chunks)
        if plain < 0:
            return []
        middle = (numbers[first] + 1 + numbers[last]) / 2
        context = float(np.sum(self.prompt_tokens + middle + shifts - 2))
        steps = [Steps(True, c + d, d + 1, context + kv, c * kv + c * c / 2) for kv, c in chunks]
        if plain:
            steps.append(Steps(False, d, d, context, 0.0, plain))
        seconds = float(ends[last] - ends[first])
        return [Observation(seconds, tuple(steps), (self.witnesses, self.prompt_tokens, n), burst)]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts of ``sizes`` tokens, each alone on the engine."""

    sizes: tuple[int, ...]

    def probes(self, rough: Rough) -> list[Probe]:
        probes, at = [], 0.0
        for size in self.sizes:
            probes.append(Probe(size, 1, at))
            at += 1.5 * rough.prefill(size) + 3 * rough.decoding(1) + 0.03
        return probes

    def expected_s(self, rough: Rough) -> float:
        return self.probes(rough)[-1].after_s + rough.prefill(self.sizes[-1])

    def read(self, answers: list[Answer], burst: int, room: int) -> list[FirstToken]:
        found, free_s = [], -np.inf
        for answer in answers:
            if len(answer.times) and answer.sent_s >= free_s:
                found.append(FirstToken(answer.probe.prompt_tokens, answer.first_s - answer.sent_s, burst))
            free_s = max(free_s, answer.last_s) if len(answer.times) else np.inf
        return found


def chunked(tokens: int, room: int):
    """(computed before, tokens) of each step that vLLM cuts a prompt into when ``room`` tokens are free in a step."""
    done = 0
    while done < tokens:
        size = min(room, tokens - done)
        yield done, size
        done += size
