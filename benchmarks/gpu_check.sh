#!/usr/bin/env bash
# On a machine with a GPU, in parts of at most nine minutes:   gpu_check.sh parity | offload-1.3b | offload-6.7b
# parity: what the machine is, every ZeRO stage and the memory engine against plain training there, the quickstart.
# offload-*: our engine against its peers at several tokens per step and budgets.
# Records go to $OUT (default: runs/gpu-check); the short table is printed last.
set -uo pipefail
part=${1:-parity}
out=${OUT:-runs/gpu-check}
python=${PYTHON:-python3}
mkdir -p "$out"

verify() { # name, then overrides
  local name=$1 log
  shift
  log="$out/verify-${name// /-}.txt"
  "$python" launch/verify.py --config configs/quickstart.yaml training.max_grad_norm=0 "$@" >"$log" 2>&1
  echo "$name: exit $?, $(tail -n 1 "$log")" >>"$out/summary.txt"
}

offload() { # model, rounds, then further options
  local model=$1 rounds=$2 tokens
  shift 2
  for tokens in 2048 4096 8192 16384; do
    "$python" launch/bench.py offload --model "$model" --dtype bf16 --tokens "$tokens" --length 2048 --recompute \
      --rounds "$rounds" --gpu-memory 16GiB,24GiB,40GiB --out "$out/$model-$tokens" "$@" >"$out/$model-$tokens.txt" 2>&1
    { echo "== $model, $tokens tokens per step: exit $?"; tail -n 14 "$out/$model-$tokens.txt"; } >>"$out/summary.txt"
  done
}

case $part in
parity)
  "$python" launch/doctor.py --json "$out/doctor.json" | tee "$out/doctor.txt"
  "$python" -m benchmarks.gpu_engine --out "$out/engine" --cases 120 2>&1 | tail -n 30 | tee -a "$out/summary.txt"
  for precision in false true; do
    for stage in 0 1 2 3; do
      verify "stage $stage bf16 $precision" "strategies.zero.stage=$stage" "training.bf16=$precision"
    done
  done
  "$python" launch/train.py --config configs/quickstart.yaml training.bf16=true "training.output_dir=$out/quickstart" \
    >"$out/quickstart.txt" 2>&1
  echo "quickstart in bf16: exit $?" >>"$out/summary.txt"
  tail -n 12 "$out/quickstart.txt"
  ;;
offload-1.3b) offload 1.3b 2 ;;
offload-6.7b) offload 6.7b 1 --subjects ours-host,ours-streamed,ours-budget,deepspeed-zero2,deepspeed-zero3 ;;
*)
  echo "unknown part '$part': parity, offload-1.3b or offload-6.7b" >&2
  exit 2
  ;;
esac
cat "$out/summary.txt"
