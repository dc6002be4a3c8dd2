#!/usr/bin/env bash
# Everything that needs a GPU, in one go, on a machine that is otherwise idle:
#
#     benchmarks/gpu_all.sh SMALL_MODEL LARGE_MODEL OUT [PART ...]
#
# Folders with a config.json are enough. Parts, all by default, in the order of their worth:
#
#     engine    gpu_engine.py of both models: steps, first tokens, prompts, mixed loads
#     tests     tests/gpu, and those of memory by themselves
#     archive   what `warmup --export` writes is all that a start in an empty home needs
#     first     first_token.py of the large model: three cold and three warm starts
#     streams   http_streams.py of the large model, 256 streams
#     prefix    prefix_ttft.py of the small model
#     sampling  kernels_sampling.py
#     passes    passes.py of the small model
#     memcheck  compute-sanitizer over one case of each kernel
#
# Each part leaves its results and its log in OUT; the exit status is that of the last part to fail.
set -uo pipefail
[ $# -ge 3 ] || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2; }
cd "$(dirname "$0")/.."
small=$1 large=$2 out=$3
shift 3
parts=${*:-engine tests archive first streams prefix sampling passes memcheck}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
dummy=(--device cuda --load-format dummy)
serve=(--load-format dummy --skip-tokenizer-init --max-model-len 9216 --max-num-seqs 256)
status=0

engine() {
  for model in "$small" "$large"; do
    python benchmarks/gpu_engine.py "$model" --out "$out/gpu_engine_$(basename "$model").json" || return
  done
}
tests() {  # pytest-benchmark, where it is installed, warns of xdist, and warnings are errors here
  python -m pytest -q -p no:benchmark -n 6 --dist loadfile -m gpu tests/gpu \
    --deselect tests/gpu/test_gpu_memory.py &&
    python -m pytest -q -p no:benchmark -m gpu tests/gpu/test_gpu_memory.py
}
archive() {
  local home
  home=$(mktemp -d)
  python -m tokenspeed warmup "$large" "${serve[@]}" --export "$out/large.tar" &&
    python -m tokenspeed explain "$large" "${serve[@]}" >"$out/explain.txt" &&
    python benchmarks/same_tokens.py "$large" >"$out/tokens_here.json" &&
    env -u TRITON_CACHE_DIR -u FLASHINFER_WORKSPACE_BASE -u TORCHINDUCTOR_CACHE_DIR \
      HOME="$home" XDG_CACHE_HOME="$home" TOKENSPEED_CACHE_DIR="$home/cache" \
      CC=/bin/false CXX=/bin/false bash -c '
        python -m tokenspeed cache import "$1/large.tar" --sha256 "$(sha256sum "$1/large.tar" | cut -d" " -f1)" &&
          python benchmarks/same_tokens.py "$2" --forbid-compiles >"$1/tokens_there.json"' _ "$out" "$large" &&
    cmp "$out/tokens_here.json" "$out/tokens_there.json" && rm "$out/large.tar"
}
first() {
  python benchmarks/first_token.py --runs 3 --model "$large" "${dummy[@]}" \
    --option max_model_len=9216 --out "$out/first_token.json"
}
streams() {
  python benchmarks/http_streams.py --model "$large" "${dummy[@]}" --option max_num_seqs=256 \
    --option max_model_len=9216 --out "$out/http_streams.json"
}
prefix() {
  python benchmarks/prefix_ttft.py --model "$small" "${dummy[@]}" --out "$out/prefix_ttft.json"
}
sampling() { python benchmarks/kernels_sampling.py --out "$out/kernels_sampling.json"; }
passes() {
  python benchmarks/passes.py --model "$small" "${dummy[@]}" --out "$out/passes.json"
}
memcheck() {
  PYTHONPATH=$PYTHONPATH:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
    --error-exitcode 1 python tests/gpu/sanitize_cases.py
}

for part in $parts; do
  began=$SECONDS
  "$part" >"$out/$part.log" 2>&1
  code=$?
  echo "$part: exit status $code after $((SECONDS - began)) s"
  [ "$code" = 0 ] || status=$code
done
exit $status
