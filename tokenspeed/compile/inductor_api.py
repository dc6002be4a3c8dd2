"""The third part of `torch_api`: Inductor, and the only place where artifacts are deserialised.

An artifact's bytes are code: a pickle that holds Python and C++ source (on CUDA, machine code).
They are given to `load` only after the cache has proved who wrote them. torch 2.11 to 2.13.
Importing this file imports Inductor (seconds). Each function has a test that fails if torch takes
its interface away.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import fx
from torch._inductor import async_compile, codecache, cpp_builder, cpu_vec_isa, debug
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch._inductor.graph import GraphLowering
from torch._inductor.standalone_compile import AOTCompiledArtifact, standalone_compile
from torch._inductor.utils import clear_caches

from tokenspeed.spans import span

PASS_SLOT = "post_grad_custom_pre_pass"
"""The slot before Inductor folds sums into matrix products."""

BASE_SETTINGS = {"cpp_cache_precompile_headers": False}
"""Where objects are compiled and where they are loaded, since it is part of their names. A compiled
header (150 MB outside the cache) would be looked up, and preprocessed for it, at every load.
"""

COMPILER_ERRORS = (CppCompileError, InvalidCxxCompiler)
"""What `load` raises where an object is missing and this machine's compiler cannot make it."""

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class VectorIsa(msgspec.Struct, frozen=True):
    """The CPU instructions that kernels were compiled for, how the compiler was told, and its name.
    No bits: none, since no compiler and CPU agreed on any.
    """

    name: str
    bits: int
    macros: list[str]
    flags: str
    compiler: str = ""


class Launch(NamedTuple):
    """A kernel that a compiled graph launches, the graph nodes in it, and the stack traces of
    those.
    """

    kernel: str
    nodes: tuple[str, ...]
    traces: tuple[str, ...]


class _RecordedIsa(cpu_vec_isa.VecISA):
    """A VectorIsa in Inductor's terms. Already tried out, so it is not compiled and run again."""

    def __init__(self, isa: VectorIsa) -> None:
        self._name = isa.name
        self._bit_width = isa.bits
        self._macro = isa.macros
        self._arch_flags = isa.flags
        self._dtype_nelements = {}

    def __str__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        return True

    __hash__ = cpu_vec_isa.VecISA.__hash__


class Left(Exception):
    """A compile that ended in the slot for passes, since `leave` said so."""


Leave = Callable[[fx.Graph], bool]
"""Asked in the slot, after the passes: is the graph all that is wanted?"""


class _Leaving(CustomGraphPass):
    """Runs another pass, and ends the compile there if it may."""

    def __init__(self, inner: CustomGraphPass, leave: Leave) -> None:
        self._inner, self._leave = inner, leave
        self.has_left = False

    def __call__(self, graph: fx.Graph) -> None:
        self._inner(graph)
        self.has_left = self._leave(graph)
        if self.has_left:
            raise Left

    def uuid(self) -> Any:
        return self._inner.uuid()


def compile_graph(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    passes: CustomGraphPass | None,
    settings: dict[str, Any],
    leave: Leave = lambda graph: False,
) -> bytes:
    """Compile a graph that returns a tuple, for `inputs` that are its own fake values. `settings`
    are Inductor's, by their dotted names. Raises Left where `leave`, asked after the passes, says
    that nothing is to be compiled.
    """
    patches = {**BASE_SETTINGS, **settings}
    leaving = None if passes is None else _Leaving(passes, leave)
    if leaving is not None:
        patches[PASS_SLOT] = leaving
    try:
        artifact = standalone_compile(
            graph_module,
            list(inputs),
            dynamic_shapes="from_graph",
            aot=True,
            options={"config_patches": patches},
        )
    except Exception:
        if leaving is not None and leaving.has_left:
            raise Left from None  # Inductor has put it into an error of its own
        raise
    data: bytes = artifact.serialize()  # type: ignore[attr-defined]
    return data


class _Uncached(CustomGraphPass):
    """Keeps Inductor from looking into its caches, where the pass would not run."""

    def __init__(self, inner: CustomGraphPass) -> None:
        self._inner = inner

    def __call__(self, graph: fx.Graph) -> None:
        self._inner(graph)

    def uuid(self) -> None:
        return None


def visit_slot(
    graph_module: fx.GraphModule, inputs: Sequence[Any], passes: CustomGraphPass
) -> None:
    """Take a graph to the slot for passes as `compile_graph` does, run them, and go no further."""
    with contextlib.suppress(Left):
        compile_graph(
            graph_module, inputs, passes=_Uncached(passes), settings={}, leave=lambda graph: True
        )


@contextlib.contextmanager
def recording_launches() -> Iterator[list[Launch]]:
    """Graphs that are compiled meanwhile tell their launches, in order. (One that comes out of
    Inductor's own cache tells none, nor does a torch that no longer keeps them: what is told is for
    people, and no reason to fail.)
    """
    launches: list[Launch] = []

    def keep(source: str) -> None:
        traces = getattr(debug, "_inductor_kernel_stack_trace", {})
        nodes_of = getattr(debug, "_inductor_triton_kernel_to_post_grad_node_info", {})
        for name, nodes in nodes_of.items():
            launches.append(Launch(name, tuple(nodes), tuple(traces.get(name, ()))))

    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch({"trace.provenance_tracking_level": 2}))
        stack.enter_context(_swapped(GraphLowering, "save_output_code", keep))
        yield launches


def load(data: bytes) -> Callable[..., Sequence[Any]]:
    """The function that `compile_graph` made; it returns its results as a list."""
    return AOTCompiledArtifact.deserialize(data)


@contextlib.contextmanager
def compiling_in(folder: Path, needs_isa: bool = True) -> Iterator[None]:
    """Let all files of Inductor and Triton go below `folder`, and take none from elsewhere. When it
    ends, so have Inductor's worker processes: nobody writes there any more. `needs_isa`: there will
    be loops in C++, so it is worth some seconds to find out what the CPU and the compiler can do.
    """
    clear_caches()
    with contextlib.ExitStack() as stack:
        stack.callback(async_compile.shutdown_compile_workers)
        stack.enter_context(_folders(folder))
        stack.enter_context(inductor_config.patch(BASE_SETTINGS))
        if needs_isa:
            with span("compile.probe_isa"):
                stack.enter_context(_best_isa_only())
        yield


@contextlib.contextmanager
def loading_from(folder: Path, isa: VectorIsa | None) -> Iterator[None]:
    """Look below `folder` for the objects that artifacts need. Nothing is probed: `isa` is that of
    the objects. An object that is not there is compiled (in seconds, by the compiler of this
    machine).
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_folders(folder))
        stack.enter_context(inductor_config.patch({**BASE_SETTINGS, "compile_threads": 1}))
        if isa is not None and hasattr(codecache, "pick_vec_isa"):
            recorded = _RecordedIsa(isa) if isa.bits else cpu_vec_isa.invalid_vec_isa
            stack.enter_context(_swapped(codecache, "pick_vec_isa", lambda: recorded))
        if isa is not None and isa.compiler and hasattr(cpp_builder, "get_cpp_compiler"):
            # An object's name is a digest of its command line. Here there may be another compiler,
            # or none.
            compiler = isa.compiler
            stack.enter_context(_swapped(cpp_builder, "get_cpp_compiler", lambda: compiler))
        yield


def vector_isa() -> VectorIsa:
    """What Inductor compiles for on this CPU, after it has tried it out."""
    isa = cpu_vec_isa.pick_vec_isa()
    compiler = cpp_builder.get_cpp_compiler()
    if not isa:
        return VectorIsa("", 0, [], "", compiler)
    return VectorIsa(str(isa), isa.bit_width(), isa.build_macro(), isa.build_arch_flags(), compiler)


@contextlib.contextmanager
def _best_isa_only() -> Iterator[None]:
    """Try out the widest instructions first, and the others only where those fail. (Inductor tries
    all, ten seconds, and takes the first.)
    """
    known = cpu_vec_isa.supported_vec_isa_list
    before = list(known)
    if platform.machine() == "x86_64":
        has = cpu_vec_isa.x86_isa_checker()
        usable = (isa for isa in before if all(name in has for name in str(isa).split()))
        known[:] = [isa for isa in [next(filter(bool, usable), None)] if isa is not None]
    try:
        yield
    finally:
        known[:] = before


@contextlib.contextmanager
def _folders(folder: Path) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _FOLDERS}
    for name, place in _FOLDERS.items():
        os.environ[name] = str(folder / place)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _swapped(holder: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
