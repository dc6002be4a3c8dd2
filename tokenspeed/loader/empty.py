"""A module with storage and no values: made in its dtype, on its device, drawing no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NoDraws(TorchFunctionMode):
    """Initialisers leave memory as it is. (The usual way, building on the meta device, imports
    torch._dynamo for `normal_` and sympy for `empty_like`: seconds of every start.)
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def empty_model(
    make: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device | str
) -> nn.Module:
    """Run `make` without initialising, and compute the buffers (`fill_buffers`).

    Parameters hold whatever the memory held: `load_weights` fills each exactly once. They have the
    dtype because they are made in it; buffers keep their own.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _NoDraws():
            model = make()
    finally:
        torch.set_default_dtype(previous)
    model = model.requires_grad_(False).eval()
    cast(Any, model).fill_buffers()
    return model
