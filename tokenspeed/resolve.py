"""Settle what settings leave open (None, "auto", nothing listed): the one place of these defaults.

    resolve(config, facts of the machine, facts of the model) -> settled config, and why

Pure: whoever calls it finds the facts. Without those of a model (it could not be found) what hangs
on them stays open. Measured values (pages, whether a cache has a program) are results, and stay
open for good. A settled config settles to itself, so a printed one can be started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenspeed.attention_backends import ATTENTION_BACKENDS, FP8, Wanted, uses_triton
from tokenspeed.config import LEVELS, Config
from tokenspeed.draft import Draft, Resolution
from tokenspeed.machine_facts import MachineFacts
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

MOST_ROWS = 512
"""The largest batch that gets a CUDA graph unless asked for: larger ones gain nothing by it."""

_FINE, _MIDDLE, _COARSE = (8, 64), (16, 256), (32, 512)
"""(step, up to): sizes between powers of two. Padding costs at most a step's worth of rows."""


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
    room = _room(draft)
    device = _settle_device(draft, machine)
    _settle_model(draft, device, model, room)
    _settle_cache_dtype(draft)
    attention = _settle_attention(draft, device, machine, model)
    _refuse_cache_dtype(draft, attention, machine)
    level = _settle_level(draft, device, attention)
    _settle_graphs(draft, has_graphs=device == "cuda" and uses_triton(attention) and level != 1)
    on = f"on {'a CPU' if device == 'cpu' else 'CUDA'}"
    budget = TOKEN_BUDGETS[device]
    draft.settle("chunked_prefill_size", None, budget, f"{on}: what takes about a second")
    is_cpu = device == "cpu"
    overlap = "the step itself needs the CPU" if is_cpu else "the host plans while the GPU works"
    draft.settle("disable_overlap_schedule", None, is_cpu, f"{on}: {overlap}")
    draft.settle("prefill_first", None, False, "answers go on while prompts are computed")
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
    if not uses_triton(attention):
        told = f"-O{level} cannot record what --attention-backend {attention} computes"
        return f"{told}; use triton, or -O1"
    return None


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes worth a CUDA graph, ascending, up to `largest`, which is one of them."""
    sizes = {1, 2, 4, largest}
    begin = 8
    for step, end in (_FINE, _MIDDLE, _COARSE):
        sizes |= set(range(begin, end + 1, step))
        begin = end + step
    return tuple(sorted(size for size in sizes if size <= largest))


def _room(draft: Draft) -> int | None:
    """Tokens of the pool, if its size was given. Raises ConfigError for one that serves nothing, or
    not what was asked for.
    """
    tokens, size, asked = map(draft.value, ("max_total_tokens", "block_size", "max_model_len"))
    if tokens is None:
        return None
    least = max(size, 2)
    if tokens < least:
        raise ConfigError(
            f"--max-total-tokens {tokens}: no request has room in fewer than {least} tokens, the "
            f"least that works with --block-size {size}; give it more, or leave it open"
        )
    room: int = -(-tokens // size) * size
    if asked is not None and asked > room:
        raise ConfigError(
            f"--max-total-tokens {tokens} has room for {room} tokens, not for one request of "
            f"--max-model-len {asked}; lower that to {room}, or raise this to {asked}"
        )
    return room


def _settle_device(draft: Draft, machine: MachineFacts) -> str:
    if draft.value("device") == "cuda" and not machine.has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if machine.has_cuda:
        draft.settle("device", "auto", "cuda", "torch sees a CUDA device")
    draft.settle("device", "auto", "cpu", "torch sees no CUDA device")
    device: str = draft.value("device")
    return device


def _settle_model(draft: Draft, device: str, model: ModelFacts | None, room: int | None) -> None:
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
        if room is not None and room < model.max_model_len:
            draft.settle("max_model_len", None, room, "what --max-total-tokens has room for")
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
    is_kernel = draft.value("device") == "cuda" and uses_triton(attention)
    if is_kernel and draft.value("kv_cache_dtype") == FP8 and (machine.capability or ()) < (8, 9):
        there = ".".join(map(str, machine.capability or ()))
        raise ConfigError(
            f"--kv-cache-dtype {FP8}: Triton has it from compute capability 8.9 on, and this GPU "
            f"has {there}; use fp8_e5m2, or bfloat16"
        )


def _settle_attention(
    draft: Draft, device: str, machine: MachineFacts, model: ModelFacts | None
) -> str | None:
    """The backend that was asked for, or the best that serves the model here and keeps no start
    waiting. None: it hangs on the model.
    """
    name: str = draft.value("attention_backend")
    if device == "cuda" and model is None and name in ("auto", "flashinfer"):
        draft.leave("attention_backend", "auto", "flashinfer or triton, by the model's layers")
        return None
    wanted = Wanted(device, draft.value("dtype"), draft.value("kv_cache_dtype"))
    lacks = _attention_lacks(wanted, machine, model)
    candidates = [each for each, row in ATTENTION_BACKENDS.items() if device in row.devices]
    if name != "auto":
        if problem := lacks[name]:
            others = [other for other in candidates if lacks[other] is None]
            remedy = f"use {others[0]}" if others else "nor does any other serve this model here"
            raise ConfigError(f"--attention-backend {name}: {problem}; {remedy}")
        return name
    told: list[str] = []
    for each in candidates:
        backend = ATTENTION_BACKENDS[each]
        gap = backend.missing(machine, wanted) or backend.unbuilt(machine, wanted)
        problem = lacks[each] or gap
        if problem is None:
            why = "; ".join(told) or str(backend.fits(machine, wanted))
            draft.settle("attention_backend", "auto", each, why)
            return each
        if problem == gap and draft.value("strict_backends"):
            raise ConfigError(
                f"--strict-backends: {each} would serve this model, but {problem}; install it, or "
                "ask for --attention-backend triton"
            )
        told.append(f"not {each}: {problem}")
    raise ConfigError(f"no attention backend serves this model here: {'; '.join(told)}")


def _attention_lacks(
    wanted: Wanted, machine: MachineFacts, model: ModelFacts | None
) -> dict[str, str | None]:
    """What each backend lacks for this model here: None if it can run."""
    unserved: Mapping[str, str] = {} if model is None else model.unserved
    return {
        name: backend.lacks(machine, wanted)
        or unserved.get(name)
        or backend.missing(machine, wanted)
        for name, backend in ATTENTION_BACKENDS.items()
    }


def _settle_level(draft: Draft, device: str, attention: str | None) -> int | None:
    is_disabled = draft.config.compile.disable_cuda_graph
    if device == "cpu":
        draft.leave("level", None, "1 if the compile cache has the program, else 0")
    elif not uses_triton(attention):
        draft.settle("level", None, 1, f"{attention}'s attention cannot be recorded as CUDA graphs")
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
