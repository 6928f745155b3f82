"""Disaggregated serving, live: pools of prefill and decode engines, the hand-off between them, and their router."""
