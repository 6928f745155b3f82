"""Each policy against its published rule, computed from a table of signals in plain Python with exact fractions."""

from collections import Counter
from fractions import Fraction
from math import inf, nan
from types import SimpleNamespace

import numpy as np
import pytest
from clusters import requests

from astrolabe_lab import policies
from astrolabe_lab.errors import InputError
from astrolabe_lab.policies import Astrolabe, Infaas, LlumnixMinus, MinQps, draw
from astrolabe_lab.request import Request
from astrolabe_lab.sim import view
from astrolabe_lab.sim.cluster import simulate
from astrolabe_lab.sim.signals import SIGNALS

REQUEST = Request(0, 0.0, prompt_tokens=10, predicted_tokens=20)


def cluster_of(rows, instances=None):
    """A view of instances with these signals; what a row leaves out is 0."""
    cluster = view.ClusterView(-1)
    cluster.instances = tuple(range(len(rows))) if instances is None else tuple(instances)
    cluster.signals = np.zeros(len(rows), SIGNALS)
    for record, row in zip(cluster.signals, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    cluster.signals.flags.writeable = False
    return cluster


def random_rows(rng, n=6):
    """Signals as an engine of 50 blocks might show them; small numbers, so that ties are common."""
    rows = []
    for _ in range(n):
        running, waiting = int(rng.integers(0, 4)), int(rng.integers(0, 3))
        first = int(rng.integers(1, 4)) if waiting else 0
        rows.append(
            {
                "running": running,
                "waiting": waiting,
                "total_blocks": 50,
                "free_blocks": int(rng.integers(0, 6)) * 10 if running else 50,
                "first_waiting_blocks": first,
                "waiting_blocks": first + int(rng.integers(1, 4)) * (waiting - 1) if waiting else 0,
                "pending_tokens": int(rng.integers(0, 5)) * 100,
                "in_flight": int(rng.integers(0, 3)),
            }
        )
    return rows


# name -> rule (larger is better) over one instance's signals, from the reference's tables
RULES = {
    "least_loaded": lambda s: -(s.running + s.waiting),
    "min_memory": lambda s: s.free_blocks,
    "infaas_a": lambda s: Fraction(s.free_blocks, max(s.running, 1)),
    "infaas_b": lambda s: -Fraction(s.total_blocks - s.free_blocks, max(s.running, 1)),
    "infaas_c": lambda s: Fraction(s.free_blocks, max(s.running + s.waiting, 1)),
    "llumnix_minus_a": lambda s: Fraction(s.free_blocks - s.waiting_blocks, max(s.running, 1)),
    "llumnix_minus_b": lambda s: (
        Fraction(s.free_blocks - s.first_waiting_blocks, s.running + (s.waiting > 0)) if s.running + s.waiting else inf
    ),
    "llumnix_minus_b:defrag=false": lambda s: (
        Fraction(s.free_blocks - s.waiting_blocks, s.running + s.waiting) if s.running + s.waiting else inf
    ),
    # the new request adds the same to every instance
    "min_tokens": lambda s: -(s.pending_tokens + REQUEST.prompt_tokens + REQUEST.predicted_tokens),
}


@pytest.mark.parametrize("name", RULES)
def test_the_choice_is_the_best_by_the_published_rule(name):
    rng, policy = np.random.default_rng(1), policies.parse(name)
    several = 0
    for _ in range(400):
        cluster = cluster_of(random_rows(rng))
        scores = [RULES[name](s) for s in cluster]
        best = {i for i, score in enumerate(scores) if score == max(scores)}
        assert policy.choose(REQUEST, cluster, rng) in best
        several += len(best) > 1
    assert several > 20  # the tables do hold ties


@pytest.mark.parametrize("name", RULES)
def test_ties_are_a_uniform_draw(name):
    busy = {
        "running": 3,
        "waiting": 2,
        "free_blocks": 1,
        "waiting_blocks": 4,
        "first_waiting_blocks": 3,
        "pending_tokens": 900,
    }
    calm = {"running": 1, "free_blocks": 45, "pending_tokens": 30}
    cluster = cluster_of([{"total_blocks": 50, **row} for row in (calm, busy, calm, calm, busy)])
    policy, rng = policies.parse(name), np.random.default_rng(2)
    drawn = Counter(policy.choose(REQUEST, cluster, rng) for _ in range(3000))
    assert set(drawn) == {0, 2, 3} and chi_square(drawn, 3) < 18.4  # exceeded once in 10,000


def chi_square(counts, cells):
    expected = sum(counts.values()) / cells
    return sum((count - expected) ** 2 for count in counts.values()) / expected + (cells - len(counts)) * expected


TWO_WAIT = {"waiting": (2, 0), "first_waiting_blocks": (5, 0), "waiting_blocks": (29, 0)}


@pytest.mark.parametrize(
    ("name", "columns", "best"),
    [
        ("min_memory", {"free_blocks": (3, 9, 5)}, 1),
        ("infaas_a", {"free_blocks": (30, 9, 22), "running": (3, 0, 2)}, 2),
        ("infaas_b", {"total_blocks": (40, 40), "free_blocks": (10, 33), "running": (5, 1)}, 0),
        ("infaas_c", {"free_blocks": (30, 16), "running": (1, 4), "waiting": (9, 0)}, 1),
        ("llumnix_minus_a", {"free_blocks": (30, 6), "waiting_blocks": (29, 0), "running": (1, 2)}, 1),
        # the second of the waiting counts without defragmentation only
        ("llumnix_minus_b", {"free_blocks": (30, 8), "running": (4, 2), **TWO_WAIT}, 0),
        ("llumnix_minus_b:defrag=false", {"free_blocks": (30, 8), "running": (4, 2), **TWO_WAIT}, 1),
        # idle: free beyond all measure, even with fewer blocks
        ("llumnix_minus_b", {"free_blocks": (999, 2), "running": (1, 0)}, 1),
        ("llumnix_minus_b:defrag=false", {"free_blocks": (999, 2), "running": (1, 0)}, 1),
        ("llumnix_minus_a", {"free_blocks": (999, 2), "running": (1, 0)}, 0),
    ],
)
def test_a_hand_made_table_has_the_expected_winner(name, columns, best):
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert policies.parse(name).choose(REQUEST, cluster_of(rows), None) == best


def test_random_is_uniform_and_round_robin_takes_turns():
    cluster, rng = cluster_of([{}] * 5), np.random.default_rng(3)
    assert chi_square(Counter(policies.parse("random").choose(REQUEST, cluster, rng) for _ in range(5000)), 5) < 23.6
    turns = policies.parse("round_robin")
    assert [turns.choose(REQUEST, cluster, rng) for _ in range(12)] == [0, 1, 2, 3, 4] * 2 + [0, 1]


def test_min_qps_counts_own_dispatches_of_its_window_by_instance_number():
    rng = np.random.default_rng(4)
    policy = MinQps(window_s=5.0)
    sent = []  # (time, instance)
    now_s = 0.0
    for turn in range(600):
        now_s += float(rng.exponential(0.3))
        numbers = (2, 5, 7) if 200 <= turn < 300 else (2, 3, 5, 7)  # instance 3 is out for a while
        chosen = numbers[policy.choose(Request(turn, now_s, 1), cluster_of([{}] * len(numbers), numbers), rng)]
        recent = Counter(i for at, i in sent if now_s - 5.0 < at <= now_s)
        assert recent[chosen] == min(recent[i] for i in numbers)
        sent.append((now_s, chosen))
    assert MinQps().window_s == 60.0


def test_po2_takes_the_shorter_of_two_distinct_instances():
    """Loads 0 < 1 < 2 < 3, made of running, waiting and own in-flight requests in turn."""
    cluster = cluster_of([{}, {"running": 1}, {"waiting": 2}, {"in_flight": 3}])
    policy, rng = policies.parse("po2_requests"), np.random.default_rng(5)
    drawn = Counter(policy.choose(REQUEST, cluster, rng) for _ in range(6000))
    # of the six pairs the best is in three, the next wins two, the third one, the last none
    assert set(drawn) == {0, 1, 2}
    for i, share in ((0, 3 / 6), (1, 2 / 6), (2, 1 / 6)):
        assert abs(drawn[i] / 6000 - share) < 0.03
    assert policy.choose(REQUEST, cluster_of([{"running": 9}]), rng) == 0
    tied = Counter(policy.choose(REQUEST, cluster_of([{}] * 3), rng) for _ in range(3000))
    assert chi_square(tied, 3) < 18.4


class Predicted:
    """A cluster whose predictions are these numbers; ``asked`` lists the instances of each call."""

    def __init__(self, values):
        self.values, self.asked = np.array(values), []

    def __len__(self):
        return len(self.values)

    def predict(self, request, metric, instances):
        self.asked.append(tuple(int(i) for i in instances))
        return self.values[list(instances)]


def test_astrolabe_takes_the_lowest_of_k_distinct_instances_drawn_uniformly():
    cluster, rng = Predicted([5.0, 1.0, 4.0, 2.0, 3.0]), np.random.default_rng(6)
    for k in (1, 2, 4):
        cluster.asked.clear()
        chosen = [Astrolabe(k).choose(REQUEST, cluster, rng) for _ in range(4000)]
        for asked, choice in zip(cluster.asked, chosen, strict=True):
            assert len(set(asked)) == k and choice == min(asked, key=lambda i: cluster.values[i])
        assert chi_square(Counter(i for asked in cluster.asked for i in asked), 5) < 23.6
        first_two = Counter(asked[:2] for asked in cluster.asked)
        assert chi_square(first_two, 5 if k == 1 else 20) < (23.6 if k == 1 else 51)


@pytest.mark.parametrize("k", [0, 5, 9])
def test_astrolabe_with_k_of_all_or_more_asks_all(k):
    cluster = Predicted([5.0, inf, 4.0, 2.0, 3.0])
    assert Astrolabe(k).choose(REQUEST, cluster, np.random.default_rng(7)) == 3
    assert [sorted(asked) for asked in cluster.asked] == [[0, 1, 2, 3, 4]]


def test_astrolabe_drops_what_does_not_fit_and_draws_from_all_when_nothing_fits():
    rng = np.random.default_rng(8)
    only = Predicted([inf, inf, 7.0, inf])
    chosen = Counter(Astrolabe(2).choose(REQUEST, only, rng) for _ in range(4000))
    assert all(len(asked) == 2 for asked in only.asked)
    # half of the pairs hold instance 2, which then wins; the others fall to all four alike
    assert abs(chosen[2] / 4000 - (1 / 2 + 1 / 8)) < 0.03
    for none in ([inf] * 4, [nan] * 4):
        assert chi_square(Counter(Astrolabe(2).choose(REQUEST, Predicted(none), rng) for _ in range(4000)), 4) < 21.1


def test_astrolabe_breaks_ties_of_predictions_uniformly():
    cluster, rng = Predicted([2.0, 1.0, 1.0, 2.0, 1.0]), np.random.default_rng(9)
    assert chi_square(Counter(Astrolabe(0).choose(REQUEST, cluster, rng) for _ in range(3000)), 3) < 18.4


def test_argmin_of_a_list_and_of_an_array_make_the_same_draw():
    rng = np.random.default_rng(10)
    special = [0.0, 1.0, -1.0, inf, -inf, nan]
    for _ in range(3000):
        values = rng.choice(special, size=int(rng.integers(1, 7))).tolist()
        one, two = np.random.default_rng(11), np.random.default_rng(11)
        chosen = draw.argmin(values, one)
        assert chosen == draw.argmin_loop(np.array(values), two), values
        assert one.bit_generator.state == two.bit_generator.state, values
        numbers = [value for value in values if value == value]
        assert not numbers or values[chosen] == min(numbers)


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *policies.NAMES,
        *("infaas_b", "infaas:variant=c", "llumnix_minus_b", "llumnix_minus:variant=b,defrag=false"),
        *("min_qps:window_s=5", "astrolabe:k=4", "astrolabe:k=all", "astrolabe:k=1,metric=ttft_s"),
        "astrolabe:metric=blend:0.5:3,foresight=learned",
        *("astrolabe:metric=added_delay_s", " astrolabe: k = 3 , metric = tpot_s "),
    ],
)
def test_text_becomes_a_policy_and_its_text_again(text):
    policy = policies.parse(text)
    assert policies.parse(policies.spec(policy)) == policy
    assert type(policy) in policies.NAMES.values()


def test_text_means_what_it_says():
    assert policies.parse("astrolabe") == Astrolabe(2, "e2e_s")
    assert policies.parse("astrolabe:k=all") == Astrolabe(0)
    assert policies.parse("astrolabe:k=4,metric=ttft_s") == Astrolabe(4, "ttft_s")
    assert policies.parse("infaas_b") == policies.parse("infaas:variant=b") == Infaas("b")
    assert policies.parse("llumnix_minus_b:defrag=false") == LlumnixMinus("b", False)
    assert policies.parse("min_qps:window_s=5") == MinQps(5.0)
    assert policies.spec(SimpleNamespace()) == "SimpleNamespace"
    assert policies.spec(Astrolabe(2, max)) == "astrolabe:k=2,metric=max"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "policy '' is unknown; allowed: random, round_robin, .*astrolabe, with options as NAME:key=value"),
        ("jsq", "policy 'jsq' is unknown; allowed: random, .*least_loaded"),
        ("infaas_d", "policy 'infaas_d' is unknown; .*short forms: infaas_a"),
        ("leastloaded", "Did you mean least_loaded?"),
        ("random:k=2", "policy random: unknown option 'k'; it has no options"),
        ("round_robin:count=3", "policy round_robin: unknown option 'count'; it has no options"),
        ("astrolabe:q=2", "policy astrolabe: unknown option 'q'; its options: k, metric, foresight"),
        ("astrolabe:k", "policy astrolabe: 'k' is not key=value"),
        ("astrolabe:k=", "policy astrolabe: 'k=' is not key=value"),
        ("astrolabe:k=two", "policy astrolabe: k=two must be a number"),
        ("astrolabe:k=2.5", "policy astrolabe: k=2.5 must be a number"),
        ("astrolabe:k=-1", "policy astrolabe: k=-1 must be a whole number >= 1, or 0 for all"),
        ("astrolabe:k=2,k=3", "policy astrolabe: k is given twice"),
        ("astrolabe:metric=latency", "metric='latency' is not one of e2e_s, ttft_s, tpot_s, added_delay_s, blend:W"),
        ("astrolabe:metric=blend:1.5", "policy astrolabe: metric='blend:1.5' is not one of .*W from 0 to 1, C >= 0"),
        ("astrolabe:metric=blend:1:-1", "policy astrolabe: metric='blend:1:-1' is not one of"),
        ("astrolabe:metric=blend:1:1:1", "policy astrolabe: metric='blend:1:1:1' is not one of"),
        ("astrolabe:metric=blend:nan", "policy astrolabe: metric='blend:nan' is not one of"),
        ("astrolabe:metric=blend", "policy astrolabe: metric='blend' is not one of"),
        ("astrolabe:foresight=yes", "policy astrolabe: foresight='yes' is not one of none, arrivals, learned, both"),
        ("infaas:variant=d", "policy infaas: variant='d' is not one of a, b, c"),
        ("infaas:variant=ab", "policy infaas: variant='ab' is not one of a, b, c"),
        ("infaas_a:variant=b", "policy infaas: variant is given twice"),
        ("llumnix_minus:variant=c", "policy llumnix_minus: variant='c' is not one of a, b"),
        ("llumnix_minus_b:defrag=1", "policy llumnix_minus: defrag=1 must be true or false"),
        ("min_qps:window_s=0", "policy min_qps: window_s=0.0 must be a number > 0"),
        ("min_qps:window_s=nan", "policy min_qps: window_s=nan must be a number > 0"),
        ("min_qps:window_s=minute", "policy min_qps: window_s=minute must be a number"),
    ],
)
def test_text_that_is_no_policy_lists_what_is_allowed(text, message):
    with pytest.raises(InputError, match=message):
        policies.parse(text)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Astrolabe(k=True), "k=True must be a whole number"),
        (lambda: Astrolabe(k=2.0), "k=2.0 must be a whole number"),
        (lambda: Astrolabe(metric=3), "policy astrolabe: metric=3 is not one of e2e_s"),
        (lambda: Infaas(None), "variant=None is not one of a, b, c"),
        (lambda: LlumnixMinus("b", "no"), "defrag='no' must be true or false"),
        (lambda: MinQps("60"), "window_s='60' must be a number > 0"),
    ],
)
def test_a_policy_refuses_wrong_settings_when_it_is_made(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_a_view_counts_indexes_and_iterates():
    cluster = cluster_of([{"running": 1}, {"running": 2}], instances=(4, 7))
    assert len(cluster) == 2 and [s.running for s in cluster] == [1, 2]
    assert cluster[np.int64(1)].running == cluster[-1].running == 2
    for outside in (2, -3):
        with pytest.raises(IndexError, match=rf"instance index {outside} is outside 0\.\.1"):
            cluster[outside]
    with pytest.raises(InputError, match="the simulation of this cluster has ended"):
        cluster.predict(REQUEST, "e2e_s", [0])


def test_a_signal_that_is_none_is_named_with_those_that_are():
    class Asks:
        def choose(self, request, cluster, rng):
            return cluster[0].queue_length

    with pytest.raises(AttributeError, match="no signal 'queue_length'; it has: instance, age_s, running"):
        simulate(requests([0.0, 1.0], 10, 2), Asks(), instances=2)


def test_a_choose_that_cannot_be_called_is_refused_before_the_run():
    class Short:
        def choose(self, request, cluster):
            return 0

    with pytest.raises(InputError, match=r"policy Short: choose\(request, cluster, rng\) cannot be called so"):
        simulate(requests([0.0, 1.0], 10, 2), Short(), instances=2)
