"""Products and convolutions as nodes of autograd's graph whose weight gradients may come later, and those gradients.

`use` is (record, name of the weight, name of the bias or ""): `record.keep` takes what is for later, or refuses.
Owns the arithmetic. Must not know when it runs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

__all__ = ["Convolution", "Product", "kernel_gradient", "product_gradient"]


class Product(torch.autograd.Function):
    """x W^T + b (`straight` False), or x W + b. x is (..., inputs)."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, use: Any, straight: bool) -> Any:
        """The product; keeps x and W."""
        ctx.save_for_backward(x, weight)
        ctx.use, ctx.straight = use, straight
        flat, matrix = x.reshape(prod(x.shape[:-1]), x.shape[-1]), weight if straight else weight.T
        y = flat @ matrix if bias is None else torch.addmm(bias, flat, matrix)
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])  # no view, so it may be written to

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        """dx; dW and db now or later."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dy @ (weight.T if ctx.straight else weight) if needs_x else None
        uses: list[Any] = [(product_gradient, (x.detach(), dy, ctx.straight))]
        if needs_bias:
            uses.append((_product_bias, (dy,)))
        if _keep(ctx.use, uses):
            return dx, None, None, None, None
        return (dx, product_gradient(x, dy, ctx.straight) if needs_weight else None,
                _product_bias(dy) if needs_bias else None, None, None)


def _keep(use: Any, uses: list[Any]) -> bool:
    record, *names = use
    kept: bool = record.keep(*((name, *work) for name, work in zip(names, uses, strict=False)))
    return kept


def product_gradient(x: torch.Tensor, dy: torch.Tensor, straight: bool) -> torch.Tensor:
    """dW of y = x W^T, or of x W where `straight`; x is (..., inputs), dy (..., outputs)."""
    rows = prod(x.shape[:-1])
    x, dy = x.reshape(rows, x.shape[-1]), dy.reshape(rows, dy.shape[-1])
    return x.T @ dy if straight else dy.T @ x


def _product_bias(dy: torch.Tensor) -> torch.Tensor:
    return dy.sum(tuple(range(dy.ndim - 1))) if dy.ndim > 1 else dy.clone()


class Convolution(torch.autograd.Function):
    """A convolution of one, two or three dims, with its settings (stride, padding, dilation, groups)."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, use: Any, settings: Any) -> Any:
        """The convolution; keeps x and the kernel."""
        ctx.save_for_backward(x, weight)
        ctx.use, ctx.settings = use, settings
        stride, padding, dilation, groups = settings
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        """dx; the kernel's and the bias' gradients now or later."""
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        uses: list[Any] = [(kernel_gradient, (x.detach(), dy, (weight.shape, ctx.settings)))]
        if needs[2]:
            uses.append((_convolution_bias, (dy,)))
        if _keep(ctx.use, uses):
            needs = (needs[0], False, False)
        return (*_convolution_part(x, weight, dy, ctx.settings, needs), None, None)


def _convolution_part(x: Any, weight: Any, dy: Any, settings: Any, needs: Any) -> Any:
    """(dx, gradient of the kernel, of the bias), None where not needed."""
    if not any(needs):
        return None, None, None
    stride, padding, dilation, groups = settings
    return torch.ops.aten.convolution_backward(dy, x, weight, [weight.shape[0]], stride, padding, dilation, False,
                                               [0] * len(stride), groups, list(needs))


def kernel_gradient(x: torch.Tensor, dy: torch.Tensor, setting: tuple[Any, Any]) -> torch.Tensor:
    """dW of a convolution; `setting` is (shape of the kernel, its settings)."""
    shape, settings = setting
    kernel = dy.new_empty(shape)  # its values are not looked at
    gradient: torch.Tensor = _convolution_part(x, kernel, dy, settings, (False, True, False))[1]
    return gradient


def _convolution_bias(dy: torch.Tensor) -> torch.Tensor:
    return dy.sum((0, *range(2, dy.ndim)))
