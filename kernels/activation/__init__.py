"""Activation functions that give an element the same bits wherever it lies in a tensor."""

from .reference import sigmoid, silu, softplus, swiglu

__all__ = ["sigmoid", "silu", "softplus", "swiglu"]
