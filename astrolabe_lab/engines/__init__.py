"""Running vLLM engines, emulated or real: what they are started with, watched by, and ended with."""
