"""What a router tells Prometheus of the requests that it served."""

from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import scripted_engines
from test_router import ask, routed, run


async def told(session, url):
    async with session.get(url + "/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_latencies_and_tokens_are_those_of_whole_answers(tmp_path):
    async def story():
        async with scripted_engines(1, token_s=0.03) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            await ask(session, url)
            await ask(session, url, stream=False)
            engines[0].script = "http:400"
            await ask(session, url)
            return await told(session, url)

    found = run(story())
    assert found["astrolabe_output_tokens_total",] == 12
    assert found["astrolabe_e2e_seconds_count",] == 2
    assert found["astrolabe_ttft_seconds_count",] == found["astrolabe_tpot_seconds_count",] == 1  # of the stream alone
    assert found["astrolabe_tpot_seconds_bucket", ("le", "0.02")] == 0 and found["astrolabe_tpot_seconds_sum",] > 0.02
    assert found["astrolabe_e2e_seconds_bucket", ("le", "+Inf")] == 2
    assert found["astrolabe_requests_total", ("status", "ok")] == 2
    assert found["astrolabe_instance_running", ("instance", "0")] == 0


def test_a_decision_is_counted_in_every_bucket_above_it(tmp_path):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (router, session, url):
            for seconds in (0.001, 0.003, 9.0):
                router.counters.decided(seconds, 0)
            return await told(session, url)

    found = run(story())
    counts = [found["astrolabe_decision_seconds_bucket", ("le", edge)] for edge in ("0.0005", "0.001", "0.005", "+Inf")]
    assert counts == [0, 1, 2, 3]
