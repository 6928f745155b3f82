import os
import subprocess
import sys


def test_the_first_use_says_that_it_compiles_and_the_next_finds_the_machine_code(tmp_path):
    code = "from astrolabe_lab.sim.compiled import blocks_of as b; print(b(33, 16), b(2.5, 1))"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
        for _ in range(2)
    ]
    assert [run.stdout for run in runs] == ["3 2.0\n"] * 2
    first, second = (run.stderr for run in runs)
    assert first.count("compiling (first use") == 1 and second == ""


def test_code_of_others_is_compiled_without_a_word():
    code = "import numba, astrolabe_lab.sim.compiled; print(numba.njit(lambda x: x + 1)(1))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr) == ("2\n", "")
