"""Settle what settings leave open (None, "auto", nothing listed): the one place of these defaults.

    resolve(config, facts of the machine, facts of the model) -> settled config, and why

Pure: whoever calls it finds the facts. Without those of a model (it could not be found) what hangs
on them stays open. Measured values (pages, whether a cache has a program) are results, and stay
open for good. A settled config settles to itself, so a printed one can be started with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenspeed.config import LEVELS, Config
from tokenspeed.draft import Draft, Resolution
from tokenspeed.options import ConfigError

TOKEN_BUDGETS = {"cpu": 512, "cuda": 8192}
"""Tokens a step: about the most that keeps others waiting for a second or less."""

RANGES = {"cpu": (0,), "cuda": (32,)}
"""Where token ranges end. On a CPU one range is enough; on CUDA the best kernels for a handful of
tokens are not those for a prefill, and the benchmark of linear layers says where they meet.
"""

DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""The name of each dtype under all its names."""

FP8 = "fp8_e4m3"
"""What a cache of fp8 is unless said otherwise."""

MOST_ROWS = 512
"""The largest batch that gets a CUDA graph unless asked for: larger ones gain nothing by it."""

_BACKENDS = {"cpu": ("torch",), "cuda": ("flashinfer", "triton", "torch")}
"""What serves attention, the best first."""

_NOT_INSTALLED = "flashinfer-python is not installed"
_NOT_BUILT = "its kernel takes minutes to compile and comes built with flashinfer-jit-cache"

_FINE, _MIDDLE, _COARSE = (8, 64), (16, 256), (32, 512)
"""(step, up to): sizes between powers of two. Padding costs at most a step's worth of rows."""


@dataclass(frozen=True, kw_only=True)
class FlashInferFacts:
    """What FlashInfer needs, and whether it is there. `built`: dtypes whose kernel is compiled;
    `built_fp8`: those whose kernel for an fp8 cache is, too.
    """

    is_installed: bool = False
    built: Sequence[str] = ()
    built_fp8: Sequence[str] = ()
    dtypes: Sequence[str] = ("bfloat16", "float16")
    head_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What the machine has. `capability`: of its GPU. `has_kernels`: whether Triton's run."""

    has_cuda: bool
    capability: tuple[int, int] | None = None
    has_kernels: bool = False
    flashinfer: FlashInferFacts = field(default_factory=FlashInferFacts)
    cache_root: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the model's files say. `dtype`: the checkpoint's, if it has one. `unserved`: why
    attention backends cannot run its layers, by name; those that can are not in it. `is_local`:
    whether it was on the machine before.
    """

    stored: str
    dtype: str | None
    max_model_len: int
    unserved: Mapping[str, str] = field(default_factory=dict)
    is_local: bool = False


def resolve(config: Config, machine: MachineFacts, model: ModelFacts | None) -> Resolution:
    """Settle what is open. Raises ConfigError, one line, for what cannot be had here."""
    draft = Draft(config)
    device = _settle_device(draft, machine)
    _settle_model(draft, device, model)
    _settle_cache_dtype(draft)
    attention = _settle_attention(draft, device, machine, model)
    _refuse_cache_dtype(draft, attention, machine)
    level = _settle_level(draft, device, attention)
    _settle_graphs(draft, has_graphs=device == "cuda" and attention != "torch" and level != 1)
    on = f"on {'a CPU' if device == 'cpu' else 'CUDA'}"
    budget = TOKEN_BUDGETS[device]
    draft.settle("chunked_prefill_size", None, budget, f"{on}: what takes about a second")
    is_cpu = device == "cpu"
    overlap = "the step itself needs the CPU" if is_cpu else "the host plans while the GPU works"
    draft.settle("disable_overlap_schedule", None, is_cpu, f"{on}: {overlap}")
    if (device, draft.value("dtype")) == ("cpu", "float32"):
        draft.leave("weight_layout", "auto", "what there are kernels for, once they are built")
    ranges = "one range" if is_cpu else "few tokens have kernels of their own"
    draft.settle("compile_ranges", (), RANGES[device], f"{on}: {ranges}")
    share = "GPU memory, less the weights" if device == "cuda" else "free RAM, 4 GiB at most"
    draft.leave("max_total_tokens", None, f"measured at start: --gpu-memory-utilization of {share}")
    draft.settle("cache_dir", None, machine.cache_root, "below the user's cache folder")
    if level == 0:
        draft.note_void("nothing is compiled at -O0", "strict_passes", "disable_pass")
    if not is_cpu:
        draft.note_void("it is about weights on a CPU", "weight_layout")
    if draft.value("max_total_tokens") is not None:
        draft.note_void("--max-total-tokens says how much", "gpu_memory_utilization")
    if model is not None and model.is_local:
        draft.note_void("the model is on this machine", "revision", "download_dir")
    return draft.resolution()


def level_problem(level: int, device: str, attention: str | None) -> str | None:
    """Why a level cannot be had, or None. `attention`: the backend, if it is known."""
    if level < 2:
        return None
    does = "replays CUDA graphs" if level == 2 else "measures CUDA kernels"
    if device != "cuda":
        return f"-O{level} {does}, and there is no CUDA device here; use -O1"
    if attention == "torch":
        return (
            f"-O{level} cannot record what --attention-backend torch computes; use triton, or -O1"
        )
    return None


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes worth a CUDA graph, ascending, up to `largest`, which is one of them."""
    sizes = {1, 2, 4, largest}
    begin = 8
    for step, end in (_FINE, _MIDDLE, _COARSE):
        sizes |= set(range(begin, end + 1, step))
        begin = end + step
    return tuple(sorted(size for size in sizes if size <= largest))


def _settle_device(draft: Draft, machine: MachineFacts) -> str:
    if draft.value("device") == "cuda" and not machine.has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if machine.has_cuda:
        draft.settle("device", "auto", "cuda", "torch sees a CUDA device")
    draft.settle("device", "auto", "cpu", "torch sees no CUDA device")
    device: str = draft.value("device")
    return device


def _settle_model(draft: Draft, device: str, model: ModelFacts | None) -> None:
    if device == "cpu":
        draft.settle("dtype", "auto", "float32", "on a CPU: the dtype that it computes fastest in")
    elif model is None:
        draft.leave("dtype", "auto", "the checkpoint says")
    else:
        why = "the checkpoint's" if model.dtype else "the checkpoint names none"
        draft.settle("dtype", "auto", model.dtype or "bfloat16", why)
    dtype = draft.value("dtype")
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"the checkpoint's dtype {dtype!r} is not supported; set --dtype")
        draft.correct("dtype", DTYPES[dtype])
    if model is None:
        draft.leave("load_format", "auto", "the model's files say")
        draft.leave("max_model_len", None, "the model says")
    else:
        draft.settle("load_format", "auto", model.stored, "what the model's files are")
        draft.settle("max_model_len", None, model.max_model_len, "the model's limit")


def _settle_cache_dtype(draft: Draft) -> None:
    dtype: str = draft.value("dtype")
    if dtype == "auto":
        draft.leave("kv_cache_dtype", "auto", "as the model is computed")
    else:
        draft.settle("kv_cache_dtype", "auto", dtype, "as the model is computed")
    if draft.value("kv_cache_dtype") == "fp8":
        draft.correct("kv_cache_dtype", FP8)


def _refuse_cache_dtype(draft: Draft, attention: str | None, machine: MachineFacts) -> None:
    is_kernel = draft.value("device") == "cuda" and attention != "torch"
    if is_kernel and draft.value("kv_cache_dtype") == FP8 and (machine.capability or ()) < (8, 9):
        there = ".".join(map(str, machine.capability or ()))
        raise ConfigError(
            f"--kv-cache-dtype {FP8}: Triton has it from compute capability 8.9 on, and this GPU "
            f"has {there}; use fp8_e5m2, or bfloat16"
        )


def _settle_attention(
    draft: Draft, device: str, machine: MachineFacts, model: ModelFacts | None
) -> str | None:
    """The backend: on a CPU torch's; on a GPU FlashInfer where it serves the model and its kernel
    comes built, else Triton, else torch's. None: it hangs on the model.
    """
    name: str = draft.value("attention_backend")
    if device == "cuda" and model is None and name in ("auto", "flashinfer"):
        draft.leave("attention_backend", "auto", "flashinfer or triton, by the model's layers")
        return None
    lacks = _attention_lacks(draft, device, machine, model)
    if name != "auto":
        if problem := lacks[name]:
            others = [other for other in _BACKENDS[device] if lacks[other] is None]
            remedy = f"use {others[0]}" if others else "nor does any other serve this model here"
            raise ConfigError(f"--attention-backend {name}: {problem}; {remedy}")
        return name
    dtype, is_fp8 = draft.value("dtype"), draft.value("kv_cache_dtype") != draft.value("dtype")
    built = machine.flashinfer.built_fp8 if is_fp8 else machine.flashinfer.built
    if lacks["flashinfer"] is None and dtype not in built:
        lacks["flashinfer"] = _NOT_BUILT
    if draft.value("strict_backends") and lacks["flashinfer"] in (_NOT_INSTALLED, _NOT_BUILT):
        raise ConfigError(
            f"--strict-backends: flashinfer would serve this model, but {lacks['flashinfer']}; "
            "install it, or ask for --attention-backend triton"
        )
    told: list[str] = []
    for each in _BACKENDS[device]:
        if lacks[each] is None:
            fits = _why_it_fits(each, machine, is_fp8=is_fp8)
            draft.settle("attention_backend", "auto", each, "; ".join(told) or fits)
            return each
        told.append(f"not {each}: {lacks[each]}")
    raise ConfigError(f"no attention backend serves this model here: {'; '.join(told)}")


def _why_it_fits(name: str, machine: MachineFacts, *, is_fp8: bool) -> str:
    if name == "torch":
        return "the backend of CPUs"
    there = "".join(map(str, machine.capability or ()))
    return (
        f"head size {machine.flashinfer.head_dim} on sm_{there}: FlashAttention-3 for prompts, "
        + ("FlashAttention-2 for those with a past in fp8, " if is_fp8 else "")
        + "Triton for the rest"
    )


def _attention_lacks(
    draft: Draft, device: str, machine: MachineFacts, model: ModelFacts | None
) -> dict[str, str | None]:
    """What each backend lacks for this model here: None if it can run."""
    lacks: dict[str, str | None] = {
        name: None if model is None else model.unserved.get(name)
        for name in ("flashinfer", "triton", "torch")
    }
    if not machine.has_kernels:
        lacks["triton"] = "its kernels need CUDA"
    if device == "cpu":
        lacks["flashinfer"] = "it needs CUDA"
    else:
        types = draft.value("dtype"), draft.value("kv_cache_dtype")
        lacks["flashinfer"] = _flashinfer_lacks(machine, lacks["flashinfer"], *types)
    return lacks


def _flashinfer_lacks(
    machine: MachineFacts, unserved: str | None, dtype: str, cache_dtype: str
) -> str | None:
    """What FlashInfer lacks on a GPU: None if it can run."""
    library = machine.flashinfer
    if machine.capability != (9, 0):
        there = ".".join(map(str, machine.capability or ()))
        return f"it needs a GPU of compute capability 9.0, not {there}"
    if dtype not in library.dtypes:
        return f"it computes in {' or '.join(library.dtypes)}, not in {dtype}"
    if cache_dtype not in (dtype, FP8):
        return f"it reads a cache of {dtype} or {FP8}, not of {cache_dtype}"
    if unserved is not None:
        return unserved
    return None if library.is_installed else _NOT_INSTALLED


def _settle_level(draft: Draft, device: str, attention: str | None) -> int | None:
    is_disabled = draft.config.compile.disable_cuda_graph
    if device == "cpu":
        draft.leave("level", None, "1 if the compile cache has the program, else 0")
    elif attention == "torch":
        draft.settle("level", None, 1, "torch's attention cannot be recorded as CUDA graphs")
    elif is_disabled:
        draft.settle("level", None, 1, "--disable-cuda-graph")
    else:
        draft.settle("level", None, 2, "on CUDA")
    level: int | None = draft.value("level")
    if level is not None and (problem := level_problem(level, device, attention)):
        raise ConfigError(problem)
    if level is not None and level > 1 and is_disabled:
        raise ConfigError(f"-O{level} records CUDA graphs, but --disable-cuda-graph; use -O1")
    return level


def _settle_graphs(draft: Draft, *, has_graphs: bool) -> None:
    names = ["cudagraph_capture_sizes", "max_cudagraph_capture_size", "disable_prefill_graph"]
    if draft.value("device") == "cpu":
        names.append("disable_cuda_graph")
    if not has_graphs or draft.value("level") == 0:
        draft.note_void("no CUDA graphs are recorded here", *names)
        draft.leave("cudagraph_capture_sizes", (), "no CUDA graphs are recorded here")
        draft.leave("max_cudagraph_capture_size", None, "no CUDA graphs are recorded here")
        return
    rows = draft.config.scheduler.max_num_seqs
    why = f"--max-num-seqs {rows}" if rows <= MOST_ROWS else "larger ones gain nothing by it"
    draft.settle("max_cudagraph_capture_size", None, min(MOST_ROWS, rows), why)
    limit = min(rows, draft.config.compile.max_cudagraph_capture_size or MOST_ROWS)
    draft.settle("cudagraph_capture_sizes", (), graph_sizes(limit), f"worth a graph up to {limit}")
    wanted = set(draft.value("cudagraph_capture_sizes"))
    larger = sorted(size for size in wanted if size > limit)
    if len(larger) == len(wanted):
        why = f"--cudagraph-capture-sizes {larger}: steps have {limit} rows at most"
        raise ConfigError(f"{why}; name smaller ones, or -O1 for no CUDA graphs")
    if larger:
        draft.notes.append(f"no CUDA graph of {larger}: steps have {limit} rows at most")
    draft.correct("cudagraph_capture_sizes", tuple(sorted(wanted - set(larger))))


def levels(device: str, attention: str | None) -> list[tuple[int, str, str | None]]:
    """Each level: what it does and costs, and why it cannot be had here, if it cannot."""
    return [
        (level, what, level_problem(level, device, attention)) for level, what in LEVELS.items()
    ]
