"""Triton's interpreter without what it computes again and again: the same numbers in a fraction of the time.

Nearly all of its time goes into types: that of a shape is made anew for every value, and of values there are dozens in
a line of a kernel. Here they are made once for each shape. Not computed at all is whether integers overflow, of which
the interpreter says nothing anyway unless it is told to debug.

It reaches into what is Triton's own, so it is done for VERSION alone; with any other one tests take their time. It can
go when Triton keeps its types itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

VERSION = "3.6.0"


def quicken() -> None:
    import numpy as np
    import triton
    import triton.language as tl
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if triton.__version__ != VERSION:
        return
    if not interpreter.interpreter_builder.options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(
            interpreter.interpreter_builder.options, sanitize_overflow=False
        )

    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    make_tensor, make_block = core.tensor.__init__, core.block_type.__init__

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    blocks: dict[tuple[str, tuple[Any, ...]], tuple[Any, int, str]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        found = blocks.get((element_ty.name, sizes))
        if found is None:
            make_block(self, element_ty, shape)
            blocks[element_ty.name, sizes] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = found

    np_dtypes: dict[str, Any] = {}
    np_dtype_of, addresses = interpreter._get_np_dtype, np.dtype(np.uint64)

    def np_dtype(type: Any) -> Any:
        element = type.element_ty if isinstance(type, core.block_type) else type
        if isinstance(element, core.pointer_type):
            return addresses
        found = np_dtypes.get(element.name)
        if found is None:
            found = np_dtypes[element.name] = np_dtype_of(element)
        return found

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch_lang = interpreter._patch_lang
    languages: dict[Any, frozenset[int]] = {}  # that a function sees, by their ids
    patched: set[int] = set()  # in the launch that is under way

    def patch(function: Any) -> Any:
        seen = languages.get(function)
        if seen is None:
            modules = {id(value) for value in function.__globals__.values() if value is tl or value is core}
            seen = languages[function] = frozenset(modules)
        if patched and seen <= patched:  # a function that a kernel calls
            return interpreter._LangPatchScope()
        scope = patch_lang(function)
        if not patched:
            restore = scope.restore

            def restored() -> None:
                patched.clear()
                restore()

            scope.restore = restored
        patched.update(seen)
        return scope

    semantic.TritonSemantic.broadcast_impl_value = broadcast_values
    interpreter._patch_lang = patch
    core.tensor.__init__ = tensor
    core.block_type.__init__ = block_type
    interpreter._get_np_dtype = np_dtype
