"""Every symbol of Inductor that `inductor_api` uses is there, on the torch that is installed, and
is what the compiler takes it for. (What it makes of them, with real objects: test_compile_lower.py)
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tokenspeed.compile import inductor_api, torch_api
from tokenspeed.compile.capture import capture
from tokenspeed.compile.inductor_api import VectorIsa
from tokenspeed.compile.split import split

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # inside Inductor

INDUCTOR = "torch._inductor."


def needs_nothing(function: Any) -> bool:
    """Can it be called without arguments?"""
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in inspect.signature(function).parameters.values()
    )


def takes(function: Any, *args: object, **options: object) -> bool:
    return inspect.signature(function).bind(*args, **options) is not None


def is_error(kind: Any) -> bool:
    return issubclass(kind, Exception)


def is_dict(value: Any) -> bool:
    return isinstance(value, dict)


TRIED: dict[str, Callable[[Any], bool]] = {
    "async_compile.shutdown_compile_workers": needs_nothing,
    "codecache.pick_vec_isa": needs_nothing,
    "config.patch": lambda patch: takes(patch, {"compile_threads": 1}),
    "cpp_builder.get_cpp_compiler": needs_nothing,
    "cpu_vec_isa.VecISA": lambda kind: (
        {"bit_width", "build_macro", "build_arch_flags"} < {*dir(kind)}
    ),
    "cpu_vec_isa.invalid_vec_isa": lambda isa: not isa,
    "cpu_vec_isa.pick_vec_isa": needs_nothing,
    "cpu_vec_isa.supported_vec_isa_list": lambda known: isinstance(known, list) and known,
    "cpu_vec_isa.x86_isa_checker": needs_nothing,
    "custom_graph_pass.CustomGraphPass": lambda kind: {"__call__", "uuid"} <= {*dir(kind)},
    "debug._inductor_kernel_stack_trace": is_dict,
    "debug._inductor_triton_kernel_to_post_grad_node_info": is_dict,
    "exc.CppCompileError": is_error,
    "exc.InvalidCxxCompiler": is_error,
    "graph.GraphLowering": lambda kind: kind.save_output_code is None,  # a hook
    "standalone_compile.AOTCompiledArtifact": lambda kind: takes(kind.deserialize, b""),
    "standalone_compile.standalone_compile": lambda function: takes(
        function, None, [], dynamic_shapes="from_graph", aot=True, options={}
    ),
    "utils.clear_caches": needs_nothing,
}
"""A symbol, and whether it is what it was."""


def used(tree: ast.Module) -> Iterator[str]:
    """Of Inductor: what is imported, and of modules the attributes, also those named as strings."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(INDUCTOR):
            for alias in node.names:
                if node.module == INDUCTOR[:-1]:
                    modules[alias.asname or alias.name] = alias.name
                else:
                    yield f"{node.module}.{alias.name}".removeprefix(INDUCTOR)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pairs = [(node.value, node.attr)]
        elif isinstance(node, ast.Call):
            texts = (each.value if isinstance(each, ast.Constant) else None for each in node.args)
            pairs = list(zip(node.args, [*texts][1:], strict=False))
        else:
            continue
        for owner, name in pairs:
            if isinstance(owner, ast.Name) and owner.id in modules and isinstance(name, str):
                yield f"{modules[owner.id]}.{name}"


def test_every_symbol_is_tried() -> None:
    assert set(used(ast.parse(Path(inductor_api.__file__).read_text()))) == TRIED.keys()


@pytest.mark.parametrize("name", TRIED)
def test_a_symbol_is_what_it_was(name: str) -> None:
    module, _, attribute = name.partition(".")
    assert TRIED[name](getattr(importlib.import_module(INDUCTOR + module), attribute))


@pytest.mark.parametrize(
    "name",
    [
        *(inductor_api.PASS_SLOT, *inductor_api.BASE_SETTINGS, "trace.provenance_tracking_level"),
        *("compile_threads", "size_asserts", "unbacked_symint_fallback", "autotune_local_cache"),
    ],
)
def test_a_setting_is_there(name: str) -> None:
    assert name in config.get_config_copy()


def test_instructions_that_were_recorded_pass_for_tried_ones() -> None:
    isa = inductor_api._RecordedIsa(VectorIsa("avx9", 512, ["CPU_CAPABILITY_AVX9"], "-mavx9"))
    assert isa and str(isa) == "avx9" and isa.bit_width() == 512
    assert (isa.build_macro(), isa.build_arch_flags()) == (["CPU_CAPABILITY_AVX9"], "-mavx9")
    assert {isa: "can be a key"}[isa]


def test_one_set_of_instructions_is_tried_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def works(isa: Any) -> bool:
        tried.append(str(isa))
        return True

    known = inductor_api.cpu_vec_isa.supported_vec_isa_list
    before = list(known)
    monkeypatch.setattr(inductor_api.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(inductor_api.cpu_vec_isa, "x86_isa_checker", lambda: ["avx2"])
    monkeypatch.setattr(inductor_api.cpu_vec_isa.VecISA, "__bool__", works)
    with inductor_api._best_isa_only():
        assert [str(isa) for isa in known] == tried == ["avx2"]
    assert known == before


def test_files_go_where_they_are_told(tmp_path: Path) -> None:
    with inductor_api.compiling_in(tmp_path, needs_isa=False):
        assert cache_dir() == str(tmp_path / "inductor")
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    with inductor_api.loading_from(tmp_path, VectorIsa("", 0, [], "", "some-compiler")):
        assert cache_dir() == str(tmp_path / "inductor")
        assert inductor_api.cpp_builder.get_cpp_compiler() == "some-compiler"
        assert not inductor_api.codecache.pick_vec_isa()


class Product(nn.Module):
    """No loop: nothing that a C++ compiler would be needed for."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


class Note(CustomGraphPass):
    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += [torch_api.op_name(node.target) for node in graph.nodes]

    def uuid(self) -> str:
        return "of this test"


@pytest.fixture
def product() -> tuple[fx.GraphModule, list[Any]]:
    """A piece, and its own fake values."""
    (piece,) = split(capture(Product().forward, (torch.zeros(8, 16),)))[1].values()
    return piece, [
        torch_api.example_value(each) for each in piece.graph.find_nodes(op="placeholder")
    ]


def test_what_is_compiled_is_loaded(
    tmp_path: Path, product: tuple[fx.GraphModule, list[Any]]
) -> None:
    note, x = Note(), torch.randn(5, 16)
    compiling = inductor_api.compiling_in(tmp_path, needs_isa=False)
    with compiling, inductor_api.recording_launches() as launches:
        data = inductor_api.compile_graph(*product, passes=note, settings={"compile_threads": 1})
    assert "aten::mm" in note.seen
    (launch,) = launches
    assert launch.kernel.startswith("extern_kernels.mm") and launch.nodes == ("mm",)
    with inductor_api.loading_from(tmp_path, None):
        run = inductor_api.load(data)
    values = [5 if torch_api.is_symbol(each) else x for each in product[1]]
    (got,) = run(*values)
    assert torch.allclose(got, x @ x.t())


def test_a_compile_ends_in_the_slot_if_it_may(
    tmp_path: Path, product: tuple[fx.GraphModule, list[Any]]
) -> None:
    note = Note()
    with inductor_api.compiling_in(tmp_path, needs_isa=False):
        with pytest.raises(inductor_api.Left):
            inductor_api.compile_graph(
                *product, passes=note, settings={}, leave=lambda graph: "aten::mm" in note.seen
            )
        note.seen.clear()
        inductor_api.visit_slot(*product, note)
    assert note.seen.count("aten::mm") == 1
