"""How every preset that comes with the package is derived: its name and the function that fits it."""

from astrolabe_lab.fit import a30, a100, others

PRESETS = {
    "llama2-7b-a30": a30.llama2_7b_a30,
    "qwen2-7b-a30": a30.qwen2_7b_a30,
    "llama2-7b-a100": a100.llama2_7b_a100,
    "llama2-7b-a40": a100.llama2_7b_a40,
    "llama2-70b-tp4-a100-40gb": a100.llama2_70b_a100,
    "qwen2.5-3b-a40": others.qwen25_3b_a40,
    "llama3.1-8b-rtxpro6000": others.llama31_8b_rtxpro6000,
}
