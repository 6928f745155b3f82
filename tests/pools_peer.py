"""Prefill and decode pools in plain Python, written from vLLM's sources and not from the compiled ones.

Synchronous scheduling, no prefix caching. Engines are objects with vLLM's two waiting queues; time is a heap. Slow and
obvious on purpose.
"""

import heapq
from itertools import count

COMPLETE, LANDED, REACH, START = range(4)  # what comes first at one instant; steps end in the engines' order


def cdiv(a, b):
    return -(-a // b)


class Job:
    def __init__(self, rid, prompt, output):
        self.rid, self.prompt, self.output = rid, prompt, output
        self.computed = self.generated = self.blocks = self.preemptions = 0
        self.remote = True  # decode has not asked for its blocks yet
        self.status = "waiting"
        self.first_s = self.end_s = None


class Engine:
    def __init__(self, number, config, cost, decode):
        self.number, self.config, self.cost, self.decode = number, config, cost, decode
        self.free = config.num_gpu_blocks - 1
        self.held = {}
        self.running, self.waiting, self.kv_holding = [], [], []
        self.step = None  # (end_s, [(job, tokens)])
        self.seen, self.news = set(), set()  # jobs whose pulls the worker has seen; that have ended
        self.steps = []

    def blocks(self, tokens):
        return cdiv(tokens, self.config.block_size)

    def grow(self, job, tokens):
        """vLLM's allocate_slots for a running request; False: no room."""
        need = self.blocks(tokens) - job.blocks
        if need > self.free:
            return False
        self.free -= max(need, 0)
        job.blocks += max(need, 0)
        return True

    def preempt(self):
        job = self.running.pop()
        self.free += job.blocks
        job.blocks = job.computed = 0
        job.preemptions += 1
        job.status = "preempted"
        self.waiting.insert(0, job)
        return job

    def schedule(self):
        """[(job, tokens)] of the next step, and the jobs that begin to pull."""
        budget, plan, preempted, pulling = self.config.max_num_batched_tokens, [], False, []
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            tokens = min(job.prompt + job.generated - job.computed, budget)
            gone = False
            while not self.grow(job, job.computed + tokens):
                preempted = True
                if self.preempt() is job:
                    gone = True
                    break
            if gone:
                break
            plan.append((job, tokens))
            budget -= tokens
            index += 1
        planned = {job.rid: tokens for job, tokens in plan}
        if not preempted:
            skipped = []
            while budget > 0:
                queue = self.kv_holding or self.waiting
                if not queue or len(self.running) >= self.config.max_num_seqs:
                    break
                job = queue[0]
                if job.status == "pulling":
                    if job.rid not in self.news:
                        skipped.append(queue.pop(0))
                        continue
                    self.news.remove(job.rid)
                    job.status = "waiting"
                    job.computed = job.prompt - 1
                known = job.prompt + job.generated
                if self.decode and job.remote:
                    unfinished = [
                        j for j in self.running if j.computed + planned.get(j.rid, 0) < j.prompt + j.generated
                    ]
                    reserved = sum(self.blocks(j.prompt + j.generated) - j.blocks for j in unfinished)
                    if self.blocks(known) > self.free - max(reserved, 0):
                        break
                    job.remote = False
                    job.blocks = self.blocks(known)
                    self.free -= job.blocks
                    job.status = "pulling"
                    pulling.append(job)
                    skipped.append(queue.pop(0))
                    continue
                tokens = min(known - job.computed, budget)
                if self.blocks(known) - job.blocks > self.free:
                    break
                self.grow(job, job.computed + tokens)
                queue.pop(0)
                job.status = "running"
                self.running.append(job)
                plan.append((job, tokens))
                planned[job.rid] = tokens
                budget -= tokens
            self.kv_holding = skipped + self.kv_holding
        return plan, pulling, preempted

    def add(self, job):
        self.waiting.append(job)

    def hear(self, rids):
        """The scheduler hears that these pulls have ended."""
        for rid in rids:
            if self.decode:
                self.news.add(rid)
            else:
                self.free += self.held.pop(rid)

    def finish(self, plan):
        """The step of that plan has ended; returns the jobs that have their last token."""
        ended = []
        for job, _ in plan:
            if job.computed < job.prompt + job.generated:
                continue
            job.generated += 1
            if job.generated == job.output:
                ended.append(job)
                self.running.remove(job)
                if self.decode:
                    self.free += job.blocks
                else:
                    self.held[job.rid] = job.blocks
        return ended

    def seconds(self, plan):
        mixed, context, attention = False, 0, 0.0
        for job, tokens in plan:
            context += job.computed
            last = job.computed + tokens == job.prompt + job.generated
            first = job.prompt - 1 if self.decode else job.prompt
            if not (tokens == 1 and last and job.computed >= first):
                mixed = True
                attention += tokens * job.computed + tokens * tokens / 2
        return self.cost.step_seconds(sum(t for _, t in plan), len(plan), context, attention, mixed)


class Peer:
    """``run(rows)``: rows of (rid, arrived_s, prompt, output, prefill, decode)."""

    def __init__(self, pools, configs, costs, hand_off, kind=None):
        kind = kind or Engine
        self.prefill = [kind(i, configs[0], costs[0], False) for i in range(pools[0])]
        self.decode = [kind(pools[0] + i, configs[1], costs[1], True) for i in range(pools[1])]
        self.hand_off = hand_off
        self.heap, self.number = [], count()
        self.pulls = {}  # rid -> [left_s, begun] of those that move
        self.moved_s = 0.0
        self.log = {}

    def at(self, time_s, rank, act):
        heapq.heappush(self.heap, (time_s, rank, next(self.number), act))

    def run(self, rows):
        self.way = {}
        for rid, arrived_s, prompt, output, p, d in rows:
            self.way[rid] = (self.prefill[p], self.decode[d], Job(rid, prompt, 1), Job(rid, prompt, output))
            self.log[rid] = {}
            self.at(arrived_s, REACH, lambda now, rid=rid: self.reach(now, self.way[rid][0], self.way[rid][2]))
        while True:
            due_s, rid = self.next_landing()
            if self.heap and (self.heap[0][0], self.heap[0][1]) < (due_s, -1):
                now, _, _, act = heapq.heappop(self.heap)
                self.move(now)
                act(now)
            elif rid is not None:
                self.move(due_s)
                del self.pulls[rid]
                self.landed(due_s, rid)
            else:
                return self

    # pulls that move share the busier of their two ends

    def sharers(self, rid):
        p, d = self.way[rid][:2]
        return max(sum(self.way[r][0] is p for r in self.pulls), sum(self.way[r][1] is d for r in self.pulls))

    def next_landing(self):
        times = [(self.moved_s + left * self.sharers(rid), rid) for rid, left in self.pulls.items()]
        return min(times, default=(float("inf"), None))

    def move(self, now):
        gone = {rid: (now - self.moved_s) / self.sharers(rid) for rid in self.pulls}
        for rid, seconds in gone.items():
            self.pulls[rid] -= seconds
        self.moved_s = now

    def join(self, now, rid):
        left_s = self.way[rid][3].blocks * self.hand_off.per_block_s
        if left_s > 0:
            self.pulls[rid] = left_s
        else:
            self.landed(now, rid)

    def landed(self, now, rid):
        p, d, _, job = self.way[rid]
        self.log[rid]["landed_s"] = now
        p.seen.add(rid)
        d.seen.add(rid)
        for engine in (p, d):
            if engine.step is None:
                self.hear(engine, engine.seen)
                self.at(now, START, lambda now, engine=engine: self.start(now, engine))

    def hear(self, engine, rids):
        """The scheduler hears that these pulls have ended."""
        rids = set(rids)
        engine.hear(rids)
        engine.seen -= rids

    # engines

    def reach(self, now, engine, job):
        engine.add(job)
        if engine.step is None:
            self.at(now, START, lambda now: self.start(now, engine))

    def start(self, now, engine):
        if engine.step is not None:
            return
        while True:
            plan, pulling, preempted = engine.schedule()
            for job in pulling:
                self.log[job.rid]["pull_s"] = now
                joins_s = now + self.hand_off.base_s
                self.at(joins_s, LANDED, lambda now, rid=job.rid: self.join(now, rid))
            if plan:
                break
            if not engine.seen and not preempted:
                return
            self.hear(engine, engine.seen)
        end_s = now + engine.seconds(plan)
        engine.steps.append((now, end_s, [(job.rid, tokens) for job, tokens in plan]))
        launched = set(engine.seen) if self.hand_off.polls == "launch" else None
        engine.step = (end_s, plan, launched)
        for job, tokens in plan:
            job.computed += tokens
        self.at(end_s, COMPLETE + engine.number / 1000, lambda now: self.complete(now, engine))

    def complete(self, now, engine):
        _, plan, launched = engine.step
        engine.step = None
        first = [job for job, _ in plan if job.generated == 0]
        ended = engine.finish(plan)
        for job in first:
            if job.generated == 1:
                job.first_s = now
        for job in ended:
            job.end_s = now
            if not engine.decode:
                d, decode_job = self.way[job.rid][1], self.way[job.rid][3]
                self.handed_over(job, decode_job)
                reaches_s = now + self.hand_off.proxy_s
                self.at(reaches_s, REACH, lambda now, d=d, job=decode_job: self.reach(now, d, job))
        self.hear(engine, engine.seen if launched is None else launched)
        self.at(now, START, lambda now: self.start(now, engine))

    def handed_over(self, prefill_job, decode_job):
        """What decode is told of the prefill's blocks."""
