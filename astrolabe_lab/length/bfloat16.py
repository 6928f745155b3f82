"""A copy of an encoder for a CPU that serves single prompts: bfloat16, laid out as its matrix units want it."""

from __future__ import annotations

import copy


def in_bfloat16(model):
    """The copy of a torch module. To cast weights for every prompt takes as long as bfloat16 saves, and torch lays out
    those of a plain Linear anew in every call, for one short prompt a third of the time: here it is done once.

    The layout is oneDNN's, by the operator that torch's own compiler uses; a torch without it keeps plain layers, which
    answer the same.
    """
    import torch

    copied = copy.deepcopy(model).to(torch.bfloat16).eval()
    if not (torch.backends.mkldnn.is_available() and _can_pack(torch)):
        return copied
    for parent in list(copied.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear:
                setattr(parent, name, _packed(torch, layer))
    return copied


def _can_pack(torch) -> bool:
    """Whether this torch and this processor multiply packed bfloat16 weights."""
    layer = torch.nn.Linear(32, 32).to(torch.bfloat16)
    try:
        _packed(torch, layer)(torch.zeros(1, 32, dtype=torch.bfloat16))
    except (AttributeError, RuntimeError):
        return False
    return True


def _packed(torch, layer):
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), _ROWS)
    bias = None if layer.bias is None else layer.bias.detach()

    class Packed(torch.nn.Module):
        in_features, out_features = layer.in_features, layer.out_features

        def forward(self, rows):
            return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")

    return Packed()


_ROWS = 128  # tokens that the layout is best for; it serves any number
