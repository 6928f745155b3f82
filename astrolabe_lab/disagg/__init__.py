"""Disaggregated serving: prefill and decode pools, the routers that pair them, and their simulator.

``constants``: what a router takes its cluster to cost. ``view``: what it knows at a decision. ``policies`` and
``marginal_cost``: the routers. ``simulate``: pools of exact engines, with the hand-off between them.
"""
