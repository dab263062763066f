"""Kernels for vLLM's float32 models on CPU that compute with the live parameters, and fast.

vLLM packs linear weights for oneDNN, which an in-place update must not allow (`vllm_worker`); what it falls back to is
MKL, at 40% of oneDNN's speed on AMD. oneDNN also takes unpacked weights: 5% slower than packed from some 32 rows on,
and always the parameter's present bytes. Norms and activations are one kernel each instead of four to eight small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_MIN_ROWS = 24
"""Fewer rows are faster in MKL: oneDNN then spends its time on the unpacked weight."""


def bind(model: torch.nn.Module) -> int:
    """Gives every linear layer, norm and activation of a float32 CPU model its kernel; the number bound.

    To be called after the model is loaded, and again after each update: a loader may replace a parameter's storage.
    Does nothing for other devices and element types.
    """
    bound = 0
    module: Any
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
            weight = None
        name = type(module).__name__
        if weight is not None and weight.ndim == 2 and hasattr(module, "cpu_linear") and _has_onednn():
            module.cpu_linear = _linear(_plain(weight))
        elif weight is not None and name == "RMSNorm" and _plain_norm(module) and _has_kernel("fused_add_rms_norm"):
            module._forward_method = _norm(_plain(weight), module.variance_epsilon)
        elif name == "SiluAndMul" and _is_float32(model) and _has_kernel("silu_and_mul"):
            module._forward_method = _silu_and_mul
        else:
            continue
        bound += 1
    return bound


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    # vLLM's parameter classes intercept every torch function; a plain view of the same storage does not.
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().as_subclass(torch.Tensor)


def _linear(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    fast = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor, _parameter: Any, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] < _MIN_ROWS:
            return functional.linear(x, weight, bias)
        return fast(x, weight, bias, "none", [], "")

    return linear


def _norm(weight: torch.Tensor, epsilon: float) -> Callable[..., Any]:
    one, fused = torch.ops._C.rms_norm, torch.ops._C.fused_add_rms_norm

    def norm(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            x = x.contiguous()
            out = torch.empty_like(x)
            one(out, x, weight, epsilon)
            return out
        fused(x, residual, weight, epsilon)
        return x, residual

    return norm


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    torch.ops._C.silu_and_mul(out, x)
    return out


def _plain_norm(module: Any) -> bool:
    return bool(module.has_weight) and module.variance_size_override is None


def _is_float32(model: torch.nn.Module) -> bool:
    parameter = next(model.parameters())
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _has_kernel(name: str) -> bool:
    return hasattr(torch.ops._C, name)
