"""Stalls the event loops of a test run now and then, as a busy host does, to find tests that take a pause for a fault.

``PYTHONPATH=tests make test PYTEST_ARGS="-p stalls tests/test_router.py"``, with ``STALLS=SHARE,SECONDS,SEED`` (default
0.02,0.7,0): the share of a loop's turns that start late, by how many seconds at most, and the seed of which.
"""

import asyncio
import os
import random
import time

SHORTEST_S = 0.03

share, longest_s, seed = (float(text) for text in os.environ.get("STALLS", "0.02,0.7,0").split(","))
dice = random.Random(seed)
turn = asyncio.base_events.BaseEventLoop._run_once


def stalled_turn(loop):
    if dice.random() < share:
        time.sleep(SHORTEST_S * (longest_s / SHORTEST_S) ** dice.random())
    turn(loop)


asyncio.base_events.BaseEventLoop._run_once = stalled_turn
