"""Settle what settings leave open (None, "auto", nothing listed): the one place of these defaults.

    resolve(config, facts of the machine, facts of the model) -> settled config, and why

Pure: whoever calls it finds the facts. Without those of a model (it could not be found) what hangs
on them stays open. Measured values (pages, whether a cache has a program) are results, and stay
open for good. A settled config settles to itself, so a printed one can be started with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.config import GROUPS, LEVELS, OPTIONS, Config
from tokenspeed.options import ConfigError, options_of

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

MOST_ROWS = 512
"""The largest batch that gets a CUDA graph unless asked for: larger ones gain nothing by it."""

_FINE, _MIDDLE, _COARSE = (8, 64), (16, 256), (32, 512)
"""(step, up to): sizes between powers of two. Padding costs at most a step's worth of rows."""

_GROUP_OF = {each.name: group for group in GROUPS for each in options_of(GROUPS[group])}


@dataclass(frozen=True, kw_only=True)
class FlashInferFacts:
    """What FlashInfer needs, and whether it is there. `built`: dtypes whose kernel is compiled."""

    is_installed: bool = False
    built: Sequence[str] = ()
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
    """What the model's files say. `dtype`: the checkpoint's, if it has one. `serves_flashinfer`:
    whether FlashInfer attends any of its layers. `is_local`: whether it was on the machine before.
    """

    stored: str
    dtype: str | None
    max_model_len: int
    serves_flashinfer: bool = False
    is_local: bool = False


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A settled config. `reasons`: why each value that was open is what it is, or why it is open
    still. `notes`: what was asked for and has no effect, a line each.
    """

    config: Config
    reasons: Mapping[str, str]
    notes: Sequence[str] = ()

    def is_given(self, name: str) -> bool:
        return name not in self.reasons


def resolve(config: Config, machine: MachineFacts, model: ModelFacts | None) -> Resolution:
    """Settle what is open. Raises ConfigError, one line, for what cannot be had here."""
    draft = _Draft(config)
    device = _settle_device(draft, machine)
    _settle_model(draft, device, model)
    attention = _settle_attention(draft, device, machine, model)
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


class _Draft:
    """A config that is being settled, with reasons."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._values: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}
        self.notes: list[str] = []

    def value(self, name: str) -> Any:
        held = getattr(getattr(self.config, _GROUP_OF[name]), name)
        return self._values.get(name, held)

    def settle(self, name: str, open_value: Any, value: Any, reason: str) -> None:
        """Take `value` where nothing was given."""
        if self.value(name) == open_value:
            self._values[name], self._reasons[name] = value, reason

    def leave(self, name: str, open_value: Any, reason: str) -> None:
        """Say why a value that was not given stays open."""
        self.settle(name, open_value, open_value, f"open: {reason}")

    def correct(self, name: str, value: Any) -> None:
        """Take another spelling of what was given, or what the limits leave of it."""
        self._values[name] = value

    def note_void(self, why: str, *names: str) -> None:
        """Note those of the options that were given another value than their default: nothing
        reads them.
        """
        given = [name for name in names if self.value(name) != OPTIONS[name].default]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            self.notes.append(f"{why}: {flags} has no effect")

    def resolution(self) -> Resolution:
        groups: dict[str, dict[str, Any]] = {}
        for name, value in self._values.items():
            groups.setdefault(_GROUP_OF[name], {})[name] = value
        changed = {
            group: dataclasses.replace(getattr(self.config, group), **values)
            for group, values in groups.items()
        }
        config = dataclasses.replace(self.config, **changed)
        return Resolution(config=config, reasons=self._reasons, notes=self.notes)


def _settle_device(draft: _Draft, machine: MachineFacts) -> str:
    if draft.value("device") == "cuda" and not machine.has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if machine.has_cuda:
        draft.settle("device", "auto", "cuda", "torch sees a CUDA device")
    draft.settle("device", "auto", "cpu", "torch sees no CUDA device")
    device: str = draft.value("device")
    return device


def _settle_model(draft: _Draft, device: str, model: ModelFacts | None) -> None:
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


def _settle_attention(
    draft: _Draft, device: str, machine: MachineFacts, model: ModelFacts | None
) -> str | None:
    """The backend: on a CPU torch's; on a GPU FlashInfer where it serves the model and its kernel
    comes built, else Triton. None: it hangs on the model.
    """
    name: str = draft.value("attention_backend")
    if name in ("torch", "triton"):
        if name == "triton" and not machine.has_kernels:
            why = "its kernels need CUDA; use torch on a CPU"
            raise ConfigError(f"--attention-backend triton: {why}")
        return name
    if device == "cpu":
        if name == "flashinfer":
            raise ConfigError("--attention-backend flashinfer: it needs CUDA; use torch")
        draft.settle("attention_backend", "auto", "torch", "the backend of CPUs")
        return "torch"
    if model is None:
        draft.leave("attention_backend", "auto", "flashinfer or triton, by the model's layers")
        return None
    dtype, library = draft.value("dtype"), machine.flashinfer
    lacks = _flashinfer_lacks(machine, model, dtype)
    if name == "flashinfer":
        if lacks:
            raise ConfigError(f"--attention-backend flashinfer: {lacks}; use triton")
        return name
    if lacks is None and dtype not in library.built:
        lacks = "its kernel takes minutes to compile and comes built with flashinfer-jit-cache"
    if lacks:
        draft.settle("attention_backend", "auto", "triton", f"not flashinfer: {lacks}")
        return "triton"
    why = f"head size {library.head_dim} on sm_{''.join(map(str, machine.capability or ()))}: "
    why += "FlashAttention-3 for prompts, Triton for the rest"
    draft.settle("attention_backend", "auto", "flashinfer", why)
    return "flashinfer"


def _flashinfer_lacks(machine: MachineFacts, model: ModelFacts, dtype: str) -> str | None:
    """What FlashInfer lacks here: None if it can run."""
    library = machine.flashinfer
    if machine.capability != (9, 0):
        there = ".".join(map(str, machine.capability or ()))
        return f"it needs a GPU of compute capability 9.0, not {there}"
    if dtype not in library.dtypes:
        return f"it computes in {' or '.join(library.dtypes)}, not in {dtype}"
    if not model.serves_flashinfer:
        return f"it serves head size {library.head_dim}, which no layer has"
    return None if library.is_installed else "flashinfer-python is not installed"


def _settle_level(draft: _Draft, device: str, attention: str | None) -> int | None:
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


def _settle_graphs(draft: _Draft, *, has_graphs: bool) -> None:
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
