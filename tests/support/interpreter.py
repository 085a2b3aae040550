"""Triton's interpreter: kernels that use tensor cores and TMA, launched on the CPU.

It multiplies fp16 and fp32, not bf16, and says nothing of the order of a sum.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import triton
import triton.experimental.gluon  # imports the library's functions, which are replaced later
from triton.language import standard
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from moe_optim.kernels.plan import BoundKernel


def _patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches alone patch the language: calls within kernels would not undo it."""
    patch, load = interpreter._patch_lang, triton.language.load
    everything = SimpleNamespace(
        __globals__={"tl": triton.language, "core": triton.language.core}  # of kernels and library
    )

    def patch_once(_: Any) -> Any:
        is_patched = triton.language.load is not load
        return interpreter._LangPatchScope() if is_patched else patch(everything)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


def interpret(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    """Have launches of a module's kernels run on the CPU; return their names, as they come."""
    seen: list[str] = []
    for library in (module, triton.language, standard):
        for name, function in vars(library).copy().items():
            if isinstance(function, JITFunction):
                monkeypatch.setattr(library, name, InterpretedFunction(function.fn))

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)  # int() of an array of one element, which numpy 2.5 refuses
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
    _patch_once(monkeypatch)

    def launch(self: BoundKernel, *given: Any) -> None:
        seen.append(self.kernel.fn.__name__)
        self.kernel[self.grid](*self.arguments, *given, **self.constants, **self.options)

    monkeypatch.setattr(BoundKernel, "__call__", launch)
    return seen
